"""The hang clinic of lesson 14: programs whose ranks wait in vain, or are wrong in silence, each as somebody reported.

``clinic()`` opens it. A diagnosis names the fault, the rank and the call; every cure is tried by a run on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_utils.ranks import share

from . import _hangs_programs as programs
from ._cases import Case, Cause, Detail, Evidence, Symptom, Table
from ._hangs_evidence import EVIDENCE, source_of
from ._hangs_lines import SAME_WAY
from ._hangs_runs import run_program
from ._wards import Clinic

share("torch._dynamo")  # what DDP imports when it is made: not anew on each rank

_OTHER_CALL = {"kind": "another call", "detail": "a mismatch", "record": "different"}

CAUSES = {
    "decision on a local value": Cause("Ranks decide on a value that only one of them has right.",
                                       _OTHER_CALL | {"on": "a condition on a value that a collective has left"}),
    "one rank only": Cause("A collective stands in a branch that only one rank takes.",
                           _OTHER_CALL | {"on": "a condition on the rank"}),
    "uneven batches": Cause("Ranks have different numbers of batches, with a collective for each.",
                            _OTHER_CALL | {"on": "the number of rounds of a for loop"}),
    "error caught on one rank": Cause("A rank catches an error and leaves out a collective.",
                                      _OTHER_CALL | {"on": "an error that is caught"}),
    "generation of different lengths": Cause("A rank stops generating before the others do.",
                                             _OTHER_CALL | {"on": "the condition of a while loop"}),
    "expert without tokens": Cause("A part of the model gets no data on one rank, and its collective is left out.",
                                   _OTHER_CALL | {"on": "a condition on data of the rank"}),
    "seeds that differ": Cause("Ranks draw different random numbers where all should draw the same.",
                               _OTHER_CALL | {"on": "a condition on chance"}),
    "both receive first": Cause(
        "Ranks receive from each other before they send.",
        {"kind": "a circle of messages", "detail": "a time-out", "record": "no collective"}),
    "message without its other side": Cause(
        "What a rank receives no rank sends, or the reverse. The fault is the call that is missing, on its rank.",
        {"kind": "a message alone", "record": "no collective"}),
    "group rank for global rank": Cause(
        "A rank within a group is passed where the rank in the world is asked for.",
        {"kind": "an error", "detail": "another error", "record": "different"}),
    "group that is no more": Cause(
        "Something is used with a process group that has been destroyed.",
        {"kind": "an error", "record": "alike", "on": SAME_WAY}),
    "order of groups": Cause(
        "Ranks use the same groups in different order.",
        {"kind": "an order", "detail": "a rank that does not come", "record": "different"}),
    "different reductions": Cause(
        "Ranks pass different operations to one reduction.",
        {"kind": "another reduction", "detail": "nothing", "record": "alike"}),
    "different roots": Cause(
        "Ranks name different roots for one collective.",
        {"kind": "another root", "record": "alike", "on": SAME_WAY}),
    "unused parameters": Cause(
        "Parameters get no gradient, so that a bucket of DDP never fills and nothing is reduced.",
        {"kind": "nothing", "record": "alike", "values": "model, weight"}),
    "different shapes": Cause("Ranks pass tensors of different shapes.",
                              {"kind": "another shape", "record": "alike", "detail": "a mismatch"}),
    "rank died": Cause("The process of a rank has gone.", {"kind": "a death", "record": "different"}),
}


def case(
    program: Callable[[], Any], cause: str, ranks: int, least: int, facts: dict, causes: Mapping[str, Cause] = CAUSES,
    **parts: Any,
) -> Case:
    """A patient whose program has this fault; the ranks communicate `least` times, all together, once it has none."""
    return Case(program=program, settings={}, cause=cause, facts=dict(causes[cause].shows) | facts, conditions=ranks,
                usual=("edit",), recorded=(), least=least, **parts)


def _case(
    program: Callable[[], Any], cause: str, ranks: int, rank: tuple, call: tuple, least: int, facts: dict, **parts: Any
) -> Case:
    details = {"rank": Detail(rank, "differs"), "call": Detail(call, "differs")}
    return case(program, cause, ranks, least, facts, details=details, **parts)


_ORDER = (
    "ranks 0,2 wait in all_reduce number 1; rank 1 never joined it (it waits in all_reduce #1 (ranks 0,1,2, group 3, "
    "4 B)). The ranks call collectives of different groups in different order: ranks 0,2 call all_reduce #1 "
    "(ranks 0,1,2, group 2, 4 B) first, rank 1 calls all_reduce #1 (ranks 0,1,2, group 3, 4 B) first."
)

CASES = (
    _case(
        programs.save_best, "decision on a local value", 2, (1,), ("reduce",), 4, result="next epoch",
        complaint="Training is fine for epochs. It stops at the end of one, and not always the same one.",
        facts={"values": "loss", "stands": "rank 0 line 7, rank 1 line 6",
               "differs": "collective #2 (default): rank 1 calls all_gather, rank 0 calls barrier"},
        why="reduce leaves the sum on rank 0 only. Rank 1 compares its own part with the best loss, and saves alone.",
        rule="what all ranks decide on must be equal on all ranks: all_reduce, or decide on one rank and broadcast.",
        thread="https://github.com/pytorch/pytorch/issues/77562",
        report="the validation loss was combined by reduce, so that ranks disagreed on whether to save.",
    ),
    _case(
        programs.save_sharded, "one rank only", 3, (0,), ("all_gather",), 6, result="saved",
        complaint="Only rank 0 writes the checkpoint, as always. Since the model is sharded, it never appears.",
        facts={"values": "shard", "stands": "rank 0 line 6, rank 1 line 8, rank 2 line 8",
               "differs": "collective #1 (default): rank 0 calls all_gather, ranks 1,2 call barrier"},
        why="the shards are gathered by a collective, and only rank 0 calls it.",
        rule="all ranks gather, one writes.",
        thread="https://github.com/pytorch/pytorch/issues/73383",
        report="the design of FSDP's full state dict on rank 0 notes that all ranks still call all collectives.",
    ),
    _case(
        programs.train_on_shards, "uneven batches", 3, (0,), ("all_reduce",), 9, result="epoch done",
        complaint="Our new data set has 7 samples, the old one had 6. The first epoch never ends.",
        facts={"values": "gradient", "stands": "rank 0 line 6, rank 1 line 7, rank 2 line 7",
               "differs": "collective #3 (default): rank 0 calls all_reduce, ranks 1,2 call barrier"},
        why="7 samples on 3 ranks are 3, 2 and 2. Rank 0 reduces a third time, and the others have gone on.",
        rule="count batches on every rank before the first epoch; drop the rest, pad, or use join.",
        thread="https://github.com/pytorch/pytorch/issues/38174",
        report="DDP fails when ranks have different numbers of inputs; from this request came the join context.",
    ),
    _case(
        programs.skip_when_full, "error caught on one rank", 3, (1,), ("all_reduce",), 9, result="trained",
        complaint="Long batches are skipped when memory is full, as on one GPU. With several it stops, much later.",
        facts={"values": "none", "stands": "rank 0 line 7, rank 1 line 10, rank 2 line 7",
               "differs": "collective #3 (default): rank 1 calls broadcast, ranks 0,2 call all_reduce"},
        why="rank 1 caught its MemoryError and left out an all_reduce. From then on it was one call ahead.",
        rule="a batch is skipped by all ranks or by none: tell the others before the collective.",
        thread="https://github.com/HannesStark/FlowSite/pull/1",
        report="batches that ran out of memory were changed to be skipped by all ranks if one had to skip.",
    ),
    _case(
        programs.generate, "generation of different lengths", 3, (0,), ("all_gather",), 9, result="trained",
        complaint="Rollouts work with one prompt for all ranks, and stop with different prompts.",
        facts={"values": "none", "stands": "rank 0 line 7, rank 1 line 5, rank 2 line 5",
               "differs": "collective #3 (default): rank 0 calls all_reduce, ranks 1,2 call all_gather"},
        why="rank 0 had its answer after two tokens and went on. Its shards are needed for every token of the others.",
        rule="with sharded parameters a forward is a collective: all ranks take as many steps as the longest.",
        thread="https://github.com/deepspeedai/DeepSpeed/issues/8262",
        report="ranks under ZeRO-3 finished generation at different lengths and then waited in different collectives.",
    ),
    _case(
        programs.exchange_halos, "both receive first", 2, (0, 1), ("recv",), 4, result=2.0,
        complaint="Two neighbors exchange their borders. Both do exactly the same, and nothing moves.",
        facts={"values": "none", "on": SAME_WAY, "stands": "rank 0 line 4, rank 1 line 4",
               "differs": "The ranks wait for each other in a circle (rank 0 → rank 1 → rank 0): each receives first "
                          "and none sends."},
        why="each rank waits for a message that the other sends only afterwards.",
        rule="neighbors exchange in one batch (batch_isend_irecv), or even ranks send first and odd ones receive.",
        thread="https://github.com/NVIDIA/nccl/issues/479",
        report="under NCCL both ranks sent first; the advice was to group the send and the receive.",
    ),
    _case(
        programs.load_in_subgroup, "group rank for global rank", 3, (1, 2), ("broadcast",), 5, result="loaded",
        complaint="The broadcast worked while the group began with rank 0.",
        facts={"values": "value", "on": "a condition on the rank",
               "stands": "rank 0 line 6, rank 1 line 5, rank 2 line 5",
               "differs": "a rank failed: ValueError: Global rank 0 is not part of group"},
        why="src=0 is a rank of the world, and rank 0 is not in the group [1, 2]. The first of the group is rank 1.",
        rule="src and dst count in the world; group_src and group_dst count in the group.",
        thread="https://github.com/OpenPipe/ART/pull/920",
        report="ranks within a context-parallel group were passed as src, and failed once groups were not the world.",
    ),
    _case(
        programs.sum_by_groups, "order of groups", 3, (1,), ("all_reduce",), 6, result=9.0,
        complaint="All ranks stand in the same line of the same function, and wait.",
        facts={"values": "none", "on": SAME_WAY, "stands": "rank 0 line 6, rank 1 line 6, rank 2 line 6",
               "differs": _ORDER},
        why="rank 1 begins with the second group, the others with the first. The line is the same, the group is not.",
        rule="groups are made and used in the same order on all ranks.",
        thread="https://github.com/meta-pytorch/torchrec/pull/4149",
        report="two groups were used in another order on some ranks; on GPUs the job stood still because these ranks "
               "also waited for the GPU in between, in tolist() and synchronize().",
    ),
    _case(
        programs.average_metric, "different reductions", 3, (1, 2), ("all_reduce",), 3, result=3.0,
        complaint="Nothing hangs. Our worst latency is 5, but none of the ranks has measured more than 3.",
        facts={"values": "none", "on": SAME_WAY, "stands": "rank 0 ended, rank 1 ended, rank 2 ended",
               "differs": "all_reduce #1 (default): rank 0 reduces with MAX, ranks 1,2 reduce with SUM"},
        why="the worst is a maximum, and ranks 1 and 2 ask for the sum. No tool of PyTorch compares that.",
        rule="check a reduced value against bounds that you know: a maximum is a value that some rank had.",
        thread="https://github.com/pytorch/ignite/issues/1813",
        report="a metric that needed a maximum was summed by all ranks, without an error; here only some ranks sum.",
    ),
    _case(
        programs.pass_back, "message without its other side", 2, (1,), ("isend", "send", "batch_isend_irecv"), 4,
        result=2.0, complaint="Two stages exchange in one batch, as one should. Stage 1 ends, stage 0 waits for ever.",
        facts={"stands": "rank 0 line 8, rank 1 ended", "values": "other", "detail": "a time-out",
               "on": "a condition on the rank",
               "differs": "message #1 from rank 1 to rank 0: rank 0 receives it, rank 1 returned after it had sent 0"},
        why="stage 0 sends and receives, stage 1 only receives. What stage 0 waits for is never sent.",
        rule="in a batch of messages each receive has its send on the other side: write both lists side by side.",
        thread="https://github.com/NVIDIA/nccl/issues/2130",
        report="one rank's batch had a send and a receive, the other's only a receive; with NCCL the other rank hung.",
    ),
    _case(
        programs.train_experts, "expert without tokens", 3, (1,), ("all_reduce",), 9, result="trained",
        complaint="The mixture of experts trains on one GPU. On several it stops sooner or later, in backward.",
        facts={"stands": "rank 0 line 5, rank 1 line 6, rank 2 line 5", "values": "none",
               "differs": "collective #2 (default): rank 1 calls barrier, ranks 0,2 call all_reduce"},
        why="no token of rank 1 went to expert 1, so rank 1 left out the reduction of this expert's gradient.",
        rule="all ranks reduce the gradients of all experts, also where a gradient is zero.",
        thread="https://github.com/deepspeedai/DeepSpeed/pull/4966",
        report="ZeRO-3 did not work with mixtures of experts, whose modules run in another order each time; since "
               "then a module can be declared a leaf.",
    ),
    _case(
        programs.step_once, "unused parameters", 2, (0, 1), ("backward",), 1, result=-1.5,
        complaint="No error, no hang. But the checkpoints of rank 0 and rank 1 are not the same model.",
        facts={"stands": "rank 0 ended, rank 1 ended", "differs": "nothing", "on": SAME_WAY},
        why="the head gets no gradient, so its bucket never fills, and DDP reduces none of the gradients in it.",
        rule="after the first step compare a checksum of the weights over the ranks; look for parameters without grad.",
        thread="https://github.com/pytorch/pytorch/issues/128949",
        report="a layer without a gradient kept DDP from reducing, without an error, and the weights drifted apart.",
    ),
    _case(
        programs.log_on_host, "different roots", 3, (2,), ("reduce",), 3, result="logged",
        complaint="One rank of each host logs. With one host it did, with two hosts it stops at the first log.",
        facts={"stands": "rank 0 line 4, rank 1 ended, rank 2 line 4", "detail": "a time-out", "values": "losses",
               "differs": "reduce #1 (default): rank 2 has root 1, ranks 0,1 have root 0"},
        why="rank 2 names rank 1 as the root of the reduction, the others name rank 0. There is one root.",
        rule="root and group of a collective are the same on all ranks; compute them once, from what all ranks know.",
        thread="https://github.com/pytorch/pytorch/issues/39706",
        report="with NCCL a reduction with different roots finished, and what came after it hung.",
    ),
    _case(
        programs.drop_layers, "seeds that differ", 2, (0, 1), ("all_reduce",), 4, result="trained",
        complaint="Layers are dropped at random, with a seed for each rank as for the data. A step stops.",
        facts={"stands": "rank 0 line 7, rank 1 line 6", "values": "none",
               "differs": "collective #4 (default): rank 1 calls all_reduce, rank 0 calls barrier"},
        why="each rank drops layers of its own choice, and a layer's reduction needs all ranks.",
        rule="what decides on a collective is drawn from a seed that all ranks share; data have seeds of their own.",
        thread="https://github.com/meta-pytorch/torchtune/pull/2266",
        report="a change of a seed made a test hang with ranks in different calls; why, the thread does not tell.",
    ),
    _case(
        programs.start_again, "group that is no more", 2, (0, 1), ("backward", "broadcast"), 2, result=1.0,
        complaint="A notebook destroys its process group, makes a new one and trains on. KeyError, and a number.",
        facts={"stands": "rank 0 line 6, rank 1 line 6", "values": "none",
               "differs": "a rank failed: KeyError: <ProcessGroup>"},
        why="DDP keeps the group that it was made with, and this one has been destroyed.",
        rule="wrap the module anew for each process group, and let go of the old wrapper before its group.",
        thread="https://github.com/pytorch/pytorch/issues/55967",
        report="groups could not be made anew once they had been destroyed; here DDP still holds the old one.",
    ),
)

CURES = {"edit": "old texts of the program and what stands there instead, such as {'reduce(loss, dst=0)': …}"}


def _check_cure(cure: dict[str, Any]) -> None:
    edit = cure["edit"]
    texts = [text for pair in edit.items() for text in pair] if isinstance(edit, dict) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"edit is {edit!r}; allowed is a dictionary from old text to new text")


def _run(case: Case, cure: dict[str, Any] | None) -> Symptom:
    source, name, ranks = source_of(case)
    for old, new in cure["edit"].items() if cure else ():
        if (count := source.count(old)) != 1:
            raise ValueError(f"{old!r} stands {count} times in the program; allowed are texts that stand once")
        source = source.replace(old, new)
    return run_program(source, name, ranks)


def clinic(
    cases: Sequence[Case] = CASES, causes: Mapping[str, Cause] = CAUSES, evidence: Mapping[str, Evidence] = EVIDENCE
) -> Clinic:
    """Open the clinic: patients on two or three ranks, fifteen by default, none of whom has been looked at."""
    return Clinic(cases, causes, evidence, CURES, _run, _check_cure)


def who_names_it(opened: Clinic) -> Table:
    """Which evidence tells each patient's fault from no fault, by asking for all, which costs: open a clinic for it."""
    rows = []
    for patient in opened:
        asked = ("stacks", "verify", "monitored barrier", "flight record", "fingerprint", "detail")
        shown = {fact: value for name in asked for fact, value in patient.ask(name).facts.items()}
        lines = {place.split(" ", 2)[2] for place in shown["stands"].split(", ")}
        marks = (len(lines) > 1, shown["differs"] != "nothing", shown["absent"].replace(", ", "").isdigit(),
                 shown["record"] == "different", shown["values"] != "none",
                 shown.get("detail", "nothing") not in ("nothing", "a time-out"))
        rows.append([f"{patient.number}", *("yes" if mark else "no" for mark in marks)])
    head = ["stacks differ", "verify", "monitored barrier", "flight records differ", "fingerprints differ", "detail"]
    return Table(["patient", *head], rows)
