"""Why kept sets differ, for docs/kvpress.md: C is the budget, T the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "tova": "kvpress never drops the last token; the paper, and ours, may",
        "h2o": "another score: kvpress divides the column sum of key j by T - j, the rows that see "
        "it, so late keys weigh more; h2o is the paper's sum, here without its recent tokens",
        "pyramid": "budgets: kvpress's ramp from 2C - C / beta down to C / beta includes the "
        "window, ours is raised by it and flatter; where C / beta < window, and the clamp to T "
        "does not help, kvpress gives every layer C; it rounds each layer alone",
        "adakv": "the safeguard: kvpress keeps the best C / 5 of a head, protected tokens among "
        "them; ours a fifth of the free slots beside them. A lower `floor` is the same",
        "stage 1": "stage 1: kvpress's is half of C and protected tokens use it up; ours is half "
        "of the free slots. A lower `first_share` is the same",
        "stage 1, heads": "stage 1 and safeguard: in kvpress protected tokens use them up, which "
        "is another share of the free slots in each head",
        "safeguard": "in a head that gets few slots, kvpress's safeguard of C / 5 keys, which "
        "values do not weigh, is more than its stage 1",
        "chunked": "windows: kvpress gives their tokens the score max + 1 before the mean, so "
        "the chunk in which the window begins stays whole; ours protects the window alone. A "
        "window of whole chunks is the same",
        "keydiff": "kvpress attends the whole prompt and cuts afterwards; ours attends what is "
        "left, as the paper does, so that layers above the first see other hidden states. The "
        "first layer is the same",
        "kvzip": "kvpress does not score the head of the chat template: it goes, but for 4 sinks. "
        "Ours scores it. With the template as sinks the two are the same",
        "kvzip chunks": 'the request for a later chunk ends in "starting with" in kvpress, in ours '
        "and the authors' code in a space after it, too",
    }
)
