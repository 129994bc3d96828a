"""What a source may not contain, because the build would then read a file that nobody declares.

The compiler's dependency file names every #include, of every pass. It does not name what the assembler reads (.incbin,
.include) or what #embed reads, and __has_include asks about files without reading them. Those are looked for in the
text, where string literals are joined and their escapes resolved first. The assembler's own dependency file (see
build.py) finds the first two however they are spelled; the text is there to say so in plain words, and for other
assemblers.
"""

from __future__ import annotations

import re

# Comments, raw strings, strings and character literals, in the order in which a compiler would see them.
_TOKEN = re.compile(
    rb'(?P<comment>//[^\n]*|/\*.*?\*/)|(?:u8|[uUL])?R"(?P<mark>[^\s()\\]{0,16})\((?P<raw>.*?)\)(?P=mark)"'
    rb'|(?:u8|[uUL])?"(?P<text>(?:[^"\\\n]|\\.)*)"|(?<![0-9a-fA-F])\'(?:[^\'\\\n]|\\.)+\'',
    re.DOTALL,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_EMBED = re.compile(rb"^[ \t]*(?:#|%:|\?\?=)\s*embed\b|\b__has_(?:embed|include|include_next)\b", re.MULTILINE)
_ASSEMBLER = re.compile(rb"incbin|\.\s*include\b|\.\s*(?:macro|irpc?|altmacro)\b", re.IGNORECASE)


def undeclared_read(data: bytes) -> str | None:
    """The first word of a source, or of a preprocessed unit, by which it could read or ask about an undeclared file."""
    spliced = re.sub(rb"\\[ \t]*\r?\n", b"", data)
    code, literals = _separate(spliced)
    if found := _EMBED.search(code):
        return b" ".join(found.group(0).split()).decode("ascii").lstrip("#%:?= ")
    for text in literals:
        if found := _ASSEMBLER.search(text):
            return b"".join(found.group(0).split()).decode("ascii").lstrip(".")
    return None


def _separate(data: bytes) -> tuple[bytes, list[bytes]]:
    """Code without comments and literals, and the literals with adjacent ones joined and escapes resolved."""
    code: list[bytes] = []
    literals: list[bytes] = []
    end, joins = 0, False
    for token in _TOKEN.finditer(data):
        between = data[end : token.start()]
        code.append(between + b" ")
        joins = joins and not between.strip()
        if token["comment"] is None:
            text = token["raw"] if token["raw"] is not None else _ESCAPE.sub(_resolve, token["text"] or b"")
            if joins:
                literals[-1] += text
            else:
                literals.append(text)
            joins = True
        end = token.end()
    return b"".join([*code, data[end:]]), literals


def _resolve(escape: re.Match[bytes]) -> bytes:
    octal, short, long, other = escape.groups()
    if other is not None:
        return {b"n": b"\n", b"t": b"\t"}.get(other, other)
    return bytes([int(octal, 8) & 255 if octal else int(short or long, 16) & 255])
