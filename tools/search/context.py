"""What the agent reads before a step, as Markdown within a budget of tokens. Produced from the records, never remembered.

    print(context(run, budget=8000))
    print(context(run, budget=32000, parent="I0004", opportunity="O0009"))

The stage and the next command stand in it at any budget that holds them; everything else is taken by usefulness, whole
lines only, and what was left out is named. `budget.estimate` says how tokens are counted. Ablations of the run take
away what `context_view` lists.
"""

from __future__ import annotations

from typing import Any

from tools.search import budget as budgets
from tools.search.budget import Section
from tools.search.context_next import Focus, focus, next_section
from tools.search.context_parts import (
    attempt_section,
    merge_section,
    numerics_section,
    objective_section,
    opportunities_section,
    source_section,
    state_section,
    steps_section,
)
from tools.search.context_predicted import predicted_section
from tools.search.context_tables import latency_section, machine_section
from tools.search.context_view import View
from tools.search.negative import archive_section, negative_section


def context(run: Any, budget: int, parent: str | None = None, opportunity: str | None = None) -> str:
    """The context of a run (tools.search.run.Run) for its next step, within `budget` tokens.

    `parent` and `opportunity` choose what the step is about. UserError where the budget is too small for the stage and
    the next command (it names the least), and where a chosen id is unknown or cannot be used now.
    """
    view = View(run)
    now = focus(view, parent, opportunity)
    return budgets.fit(sections(view, now), budget)


def sections(view: View, now: Focus) -> list[Section]:
    """All sections in the order in which they are shown."""
    return [
        next_section(view, now),
        state_section(view),
        objective_section(view),
        attempt_section(view, now),
        opportunities_section(view, now),
        merge_section(view, now),
        latency_section(view, now),
        predicted_section(view),
        machine_section(view, now),
        negative_section(view, now),
        archive_section(view),
        steps_section(view),
        numerics_section(view, now),
        source_section(view, now),
    ]
