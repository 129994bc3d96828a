/* The C interface of the operators between attention calls: plain C, no torch, pointers to memory of the host.
 *
 * A library exports every function below; tools/aligned/abi.py mirrors this file and nothing else may call them. All
 * matrices are rows of consecutive elements, bf16 is its raw 16 bits, sizes are counts of elements. No output overlaps an
 * input. threads: at most so many; 0: one per core. Each returns 0 or a negative code of OPERATORS_ERRORS.
 * A change here is a new OPERATORS_ABI_VERSION.
 */
#ifndef OPERATORS_ABI_H
#define OPERATORS_ABI_H
#include <stdint.h>

#define OPERATORS_ABI_VERSION 1

#define OPERATORS_OK 0
#define OPERATORS_BAD_SIZE (-1)     /* a size below 1 (rows: below 0), a width that is no multiple of 16, or a null pointer */
#define OPERATORS_BAD_INDEX (-2)    /* a token, target, position or sequence out of range: nothing was written */
#define OPERATORS_BAD_THREADS (-3)  /* a negative number of threads */
#define OPERATORS_NO_MEMORY (-4)    /* no memory for the threads' scratch space */

#ifdef __cplusplus
extern "C" {
#endif

int operators_abi_version(void);

/* out[r] = table[ids[r]]; table [vocabulary, width]. */
int operators_embedding(const uint16_t* table, const int64_t* ids, uint16_t* out, int64_t vocabulary, int64_t rows,
                        int64_t width, int32_t threads);

/* out[i] = a[i] + b[i], i < count. */
int operators_add(const uint16_t* a, const uint16_t* b, uint16_t* out, int64_t count, int32_t threads);

/* x, out [rows, width], weight [width]; width a multiple of 16. */
int operators_rmsnorm(const uint16_t* x, const uint16_t* weight, uint16_t* out, int64_t rows, int64_t width, float epsilon,
                      int32_t threads);

/* cosines, sines fp32 [rows, 64] of positions[r] * frequencies[i]; positions from 0 to 2^24. */
int operators_angles(const int64_t* positions, const float* frequencies, float* cosines, float* sines, int64_t rows,
                     int32_t threads);

/* x, out [rows, heads, 128]; cosines, sines [rows, 64]. */
int operators_rope(const uint16_t* x, const float* cosines, const float* sines, uint16_t* out, int64_t rows, int64_t heads,
                   int32_t threads);

/* x [rows, inputs], weight [outputs, inputs], bias [outputs] or NULL, out [rows, outputs]; inputs a multiple of 16. */
int operators_linear(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                     int64_t inputs, int64_t outputs, int32_t threads);

/* gate, up, out [rows, width] with rows of gate and up `stride` elements apart; width a multiple of 16. */
int operators_swiglu(const uint16_t* gate, const uint16_t* up, uint16_t* out, int64_t rows, int64_t width, int64_t stride,
                     int32_t threads);

/* logits [rows, experts]; chosen, weights [rows, top]. normalise: the chosen weights sum to 1. */
int operators_route(const uint16_t* logits, int64_t* chosen, float* weights, int64_t rows, int64_t experts, int64_t top,
                    int32_t normalise, int32_t threads);

/* out[r] = the sum over s of weights[r][s] * products[r][s]; products [rows, top, width]; width a multiple of 16. */
int operators_combine(const uint16_t* products, const float* weights, uint16_t* out, int64_t rows, int64_t top, int64_t width,
                      int32_t threads);

/* cache [sequences, heads, capacity, 128]: cache[sequence[r]][h][position[r]] = x[r][h]; x [rows, heads, 128]. */
int operators_cache_write(const uint16_t* x, const int64_t* sequence, const int64_t* position, uint16_t* cache, int64_t rows,
                          int64_t heads, int64_t sequences, int64_t capacity, int32_t threads);

/* out[r] = log softmax(logits[r])[targets[r]] in fp32; logits [rows, vocabulary]. */
int operators_log_prob(const uint16_t* logits, const int64_t* targets, float* out, int64_t rows, int64_t vocabulary,
                       int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
