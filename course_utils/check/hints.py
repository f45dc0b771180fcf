"""Hints that all exercises have; one of the same key among an exercise's mistakes comes before it."""

from __future__ import annotations

COMMON_HINTS = {
    "empty": (
        "Write your answer in the cell above in place of the raise line, run that cell, then run this "
        "check again."
    ),
    "not-distributed": (
        "This rank sent and received nothing. What the other ranks hold has to reach it through "
        "torch.distributed while your function runs; it cannot be computed locally."
    ),
    "only-two-ranks": (
        "It passed with 2 ranks and fails with more. Look for a 2, a 1 - rank or a rank ^ 1 where the "
        "world size belongs."
    ),
    "one-rank": "With one rank there is nobody to talk to, and the function must work all the same.",
    "hang": (
        "At least one rank waits for a call that another rank never reaches. The report below shows where "
        "it waits."
    ),
    "slow": (
        "No rank waits for another in vain: at least one is still computing or sleeping. Look for an "
        "endless loop at the line named below."
    ),
    "endless": "Look at the condition of each loop: what inside the loop changes it?",
    "not-started": (
        "This says nothing about your answer. Run the check again; if that does not help, run `python -m "
        "tools doctor` in a terminal."
    ),
    "odd": "Return exactly what the docstring promises: that type, with nothing wrapped around it.",
    "error": (
        "The function stopped before it returned a result. If an error stopped it, you see that error "
        "below, usually with the line of your code that raised it."
    ),
    "view": "Not every tensor is contiguous. Where view fails, reshape and flatten make a copy.",
    "shape": "Whatever its numbers, the result does not have the form that the docstring promises.",
    "value": (
        "Try a small case: call the function yourself, with launch if it needs ranks, and print what it "
        "holds before and after each step."
    ),
    "float32": (
        "Only the first digits are right, as if the numbers passed through a smaller dtype such as float32 or "
        "bfloat16. torch.zeros and torch.empty make float32; new_empty, zeros_like and cat keep the dtype."
    ),
    "no-gradient": (
        "A gradient is missing. Autograd does not see through collectives, detach(), no_grad() or a copy "
        "without a history."
    ),
    "no-broadcast": (
        "The ranks start with different weights here, as they do after different seeds. Before the first step "
        "every rank has to take over those of rank 0, frozen ones and buffers too."
    ),
    "frozen": (
        "It is right until a layer is frozen (requires_grad is False): such a layer is not updated, has no "
        "gradient, needs no hook and costs no bytes."
    ),
    "tied": (
        "It is right until two layers share one parameter, in whose gradient autograd adds up both uses. "
        "module.parameters() yields it once; a walk over the modules, or "
        "named_parameters(remove_duplicate=False), yields it twice."
    ),
    "dtype": (
        "The numbers are right, or nearly, but not in the dtype that the docstring promises. Large whole numbers "
        "lose digits in a float."
    ),
    "input-changed": (
        "Many calls of torch.distributed write into the tensor that they are given, and so does an "
        "operation like +=. Work on a copy (x.clone()) or a new tensor where the caller's tensor must "
        "survive."
    ),
    "other-calls": "This exercise asks for other operations. record() shows the calls of each rank.",
    "too-many-calls": "The result is right, but it takes more calls than needed. record() shows them.",
    "too-few-calls": "The result is right, but the ledger lacks some of the calls that should have produced it.",
    "too-many-bytes": (
        "The result is right, but more bytes travel than necessary. record() shows the size of each call."
    ),
    "too-few-bytes": (
        "The result is right, but the ledger shows too few bytes for it: some of the numbers must have "
        "come another way."
    ),
    "too-large": (
        "The result is right, but a single call carries more than it should. record() shows the size of "
        "each."
    ),
}

#: Of problems that are computed on paper.
PAPER_HINTS = {
    "number": "Return exactly the values that the docstring names, in its order and its units.",
    "numbers": "Write the unit beside every factor and see what cancels. Then work through a small case by hand.",
    "typed": "The answer does not change with the arguments. Compute it from them.",
    "drawn": (
        "It is right for the fixed cases, but not for these arguments, which were drawn at random. The "
        "formula has to hold for all of them."
    ),
}
