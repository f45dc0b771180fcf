"""What exercise checks are made of: the audit of a ledger, rank context, problems for paper, hints, comparisons."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import threading
from fractions import Fraction
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import Entry
from course_utils import check as checks
from course_utils.check import CheckFailed, Exercise, Outcome, formulas, message_steps, paper_problem, traffic
from course_utils.check._hints import HintError, read_hints
from course_utils.check.compare import slip_of
from course_utils.check.edits import EditError
from course_utils.check.training import compare, compare_tensor

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = Path(__file__).resolve().parents[2]
CHECKS = sorted(ROOT.glob("lessons/*/check.py"))
MODULES = [importlib.import_module(f"lessons.{path.parent.name}.check") for path in CHECKS]
PAPER = {
    f"{module.__name__.split('.')[1]}.{name}": check
    for module in MODULES
    for name in module.__all__
    if hasattr(check := getattr(module, name), "formula")
}


def refusal(do, *args, **kwargs) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        do(*args, **kwargs)
    return caught.value


# --- the audit of a ledger -------------------------------------------------------------------------------------------


def ledger(*calls: str, ranks: int = 4) -> list[Entry]:
    """Entries from words such as ``all_reduce:80``; each is a call of all ranks, or a message."""
    parts = (call.split(":") for call in calls)
    return [Entry(op, "default", int(size), None, tuple(range(ranks)), 1, 0.0) for op, size in parts]


def audited(entries: list[Entry], *args, ranks: int = 4, hints: dict | None = None, **limits) -> str | None:
    """The hint that an audit gives, or None."""
    exercise = Exercise("Exercise 1", hints or {})
    exercise.world_sizes.append(ranks)
    try:
        exercise.audit(entries, *args, **limits)
    except CheckFailed as error:
        return error.hint
    return None


@pytest.mark.parametrize(
    ("calls", "limits", "hint"),
    [
        ("all_reduce:80 barrier:0", {"ops": {"all_reduce"}}, None),
        ("all_reduce:80 broadcast:8", {"ops": {"all_reduce"}}, "other-calls"),
        ("all_reduce:80 barrier:0", {"calls": (1, 1)}, None),
        ("all_reduce:80 all_reduce:8", {"calls": 1}, "too-many-calls"),
        ("all_reduce:80", {"calls": (2, None)}, "too-few-calls"),
        ("barrier:0", {"calls": (1, None)}, "not-distributed"),
        ("barrier:0", {"sent": (8, None)}, "not-distributed"),
        ("", {"calls": 3}, None),
        ("send:8 recv:8 recv:8", {"calls": {"send": 1}}, None),
        ("send:8 recv:8 recv:8", {"calls": {"send": 1, "recv": 1}}, "too-many-calls"),
        ("send:40 recv:40", {"sent": (40, 40)}, None),
        ("send:41 recv:1", {"sent": 40}, "too-many-bytes"),
        ("send:39 recv:60", {"sent": (40, None)}, "too-few-bytes"),
        ("all_reduce:80", {"sent": (120, 120)}, None),
        ("reduce_scatter:80 all_gather:80", {"sent": (120, 120)}, None),
        ("all_reduce:80", {"sent": 118}, "too-many-bytes"),
        ("all_gather:80", {"sent": (120, None)}, "too-few-bytes"),
        ("all_reduce:80 send:8 recv:8", {"carried": (88, 88)}, None),
        ("all_reduce:80 send:8", {"carried": 80}, "too-many-bytes"),
        ("all_reduce:80", {"carried": (81, None)}, "too-few-bytes"),
        ("send:8 send:9", {"largest": 8}, "too-large"),
        ("send:8 send:8", {"largest": 8}, None),
    ],
)
def test_an_audit_finds_what_is_beyond_its_limits(calls, limits, hint):
    assert audited(ledger(*calls.split()), **limits) == hint


def test_a_single_rank_may_do_anything():
    assert audited(ledger("send:8"), {"all_reduce"}, ranks=1, calls=(5, 5), sent=(100, 100)) is None


def test_each_finding_of_an_audit_gets_the_hint_it_is_given():
    hints = {"hub": "One rank.", "messages": "No messages.", "wide": "Too wide."}
    keys = {"broadcast": "hub", "send": "messages", "too-many-bytes": "wide"}
    both = ledger("send:8", "broadcast:8")
    assert audited(both, {"all_reduce"}, hints=hints, keys=keys) == "hub"
    assert audited(both, {"all_reduce"}, hints=hints, keys=dict(reversed(keys.items()))) == "messages"
    assert audited(ledger("gather:8"), {"all_reduce"}, hints=hints, keys=keys) == "other-calls"
    assert audited(ledger("all_reduce:8"), carried=7, hints=hints, keys=keys) == "wide"


def test_an_audit_may_not_name_hints_that_there_are_not():
    with pytest.raises(ValueError, match="no hints wdie"):
        audited(ledger("all_reduce:8"), carried=9, keys={"too-many-bytes": "wdie"})


def test_an_audit_says_where_and_on_which_rank():
    exercise = Exercise("Exercise 1", {})
    with exercise.on_rank(3):
        text = str(refusal(exercise.audit, ledger("all_reduce:8", "send:4"), calls=1, where="step 2: "))
    assert text.startswith("Exercise 1, rank 3: step 2: 2 calls in all; 1 is enough.")


def test_entries_between_nodes_are_told_from_those_inside():
    inside, across = Entry("send", "", 8, 1, (), 1, 0.0), Entry("send", "", 8, 2, (), 1, 0.0)
    assert [traffic.crosses(entry, 0, 2) for entry in (inside, across)] == [False, True]
    group = [Entry("all_reduce", "", 8, None, ranks, 1, 0.0) for ranks in ((2, 3), (1, 3))]
    assert [traffic.crosses(entry, 3, 2) for entry in group] == [False, True]


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_refusals_name_the_rank_of_their_loop():
    exercise = Exercise("Exercise 1", {})

    def loop(failing):
        for rank, outcome in exercise.each("abc"):
            exercise.require(rank != failing, "value", f"{outcome} is wrong.")

    loop(5)
    assert exercise.rank is None
    error = refusal(loop, 1)
    assert error.rank == 1 and "rank 1: b is wrong" in str(error)
    with exercise.on_rank(2):
        assert refusal(exercise.refuse, "value", "no.", 0).rank == 0


def test_refusals_begin_with_where_they_were_found():
    exercise = Exercise("Exercise 1", {})

    def steps():
        for _, outcome in exercise.each([3, 4], "step 2: "):
            if outcome == 4:
                exercise.differs("value", "it is wrong.", 3, outcome)

    error = refusal(steps)
    assert error.rank == 1
    assert str(error).startswith("Exercise 1, rank 1: step 2: it is wrong.\n  expected  3\n  got       4\n")
    assert str(refusal(exercise.refuse, "value", "no.")).startswith("Exercise 1: no.")


def test_a_check_computes_in_one_thread_and_leaves_the_number_as_it_was():
    seen, before = [], torch.get_num_threads()

    @checks.checked
    def check(fn):
        seen.append(torch.get_num_threads())
        Exercise("Exercise 1", {}).refuse("value", fn())

    torch.set_num_threads(2)
    try:
        assert "no." in str(refusal(check, lambda: "no.")) and seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_answer_finds_nothing_that_other_ranks_were_given():
    def looks_around(x):
        found, frame = [], sys._getframe(1)
        while frame is not None:
            found += [v for v in frame.f_locals.get("inputs", ()) if isinstance(v, torch.Tensor)]
            frame = frame.f_back
        return len(found)

    outcomes = Exercise("Exercise 1", {}).run(looks_around, [torch.full((2,), float(r)) for r in range(2)])
    assert [(o.result, o.before.tolist()) for o in outcomes] == [(0, [0.0, 0.0]), (0, [1.0, 1.0])]


def test_a_barrier_is_no_communication():
    exercise = Exercise("Exercise 1", {})
    quiet = Outcome(None, ledger("barrier:0"), None, None)
    assert refusal(exercise.communicates, 0, quiet, 2).hint == "not-distributed"
    exercise.communicates(0, Outcome(None, ledger("send:8"), None, None), 2)


def test_a_message_to_itself_is_laid_to_the_single_rank():
    def answer(x):
        other = (dist.get_rank() + 1) % dist.get_world_size()
        message = dist.isend(x, other)
        dist.recv(torch.empty_like(x), other)
        message.wait()

    exercise = Exercise("Exercise 1", {}, 1.0)
    exercise.run(answer, [torch.ones(2)] * 2)
    assert refusal(exercise.run, answer, [torch.ones(2)]).hint == "one-rank"


def after_two_ranks(answer, fallback: str | None = None, errors: str | None = None) -> str:
    exercise = Exercise("Exercise 1", {"odd-sizes": "Sizes differ."}, 1.0)
    exercise.run(answer, [torch.ones(2)] * 2)
    return refusal(exercise.run, answer, [torch.ones(2)] * 3, fallback=fallback, errors=errors).hint


def fails_with(error: Exception):
    def answer(x):
        if dist.get_world_size() == 3:
            raise error

    return answer


def too_long_a_message(x):
    if dist.get_world_size() == 3:
        dist.send(x.double(), 1) if dist.get_rank() == 0 else dist.recv(x, 0)


def waits_in(call):
    def answer(x):
        if dist.get_world_size() == 3 and dist.get_rank() == 0:
            call(x)

    return answer


@pytest.mark.parametrize(
    ("answer", "usual", "own"),
    [
        (fails_with(IndexError("list index out of range")), "only-two-ranks", "odd-sizes"),
        (fails_with(ValueError("there is no rank 3")), "only-two-ranks", "odd-sizes"),
        (fails_with(ValueError("2 is not in list")), "only-two-ranks", "odd-sizes"),
        (fails_with(RuntimeError("shape '[3, -1]' is invalid for input of size 7")), "only-two-ranks", "odd-sizes"),
        (fails_with(ZeroDivisionError("division by zero")), "error", "error"),
        (too_long_a_message, "only-two-ranks", "odd-sizes"),
        (waits_in(lambda x: dist.recv(x, 1)), "only-two-ranks", "odd-sizes"),
        (waits_in(dist.all_reduce), "hang", "odd-sizes"),
    ],
)
def test_only_failures_about_what_differs_are_laid_to_it(answer, usual, own):
    assert after_two_ranks(answer) == usual
    assert after_two_ranks(answer, "odd-sizes") == own


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (fails_with(ValueError("bad\nmore")), "rank 0: the function did not return a result: ValueError: bad."),
        (waits_in(lambda x: dist.recv(x, 1)), "the ranks do not finish: at least one waits in vain."),
    ],
)
def test_a_failure_is_told_in_the_first_sentence(answer, said):
    error = refusal(Exercise("Exercise 1", {}, 1.0).run, answer, [torch.ones(2)] * 3)
    assert said in str(error).split("\n")[0]


def test_fallback_of_a_case_explains_the_errors_that_the_case_names():
    absent = AttributeError("'NoneType' object has no attribute 'detach'")
    assert after_two_ranks(fails_with(absent), "odd-sizes") == "error"
    assert after_two_ranks(fails_with(absent), "odd-sizes", "NoneType") == "odd-sizes"
    assert after_two_ranks(fails_with(absent), None, "NoneType") == "error"
    assert after_two_ranks(fails_with(RuntimeError("inputShape[0] is wrong")), "odd-sizes") == "odd-sizes"


# --- steps -----------------------------------------------------------------------------------------------------------


def steps_of(fn, n: int = 2) -> int:
    outcomes = Exercise("Exercise 1", {}).run(fn, [torch.ones(3)] * n)
    return message_steps([outcome.ledger for outcome in outcomes])


def posted_first(x):
    """Three round trips; rank 0 posts each receive before its send."""
    for _ in range(3):
        if dist.get_rank() == 0:
            answer = dist.irecv(torch.empty_like(x), 1)
            dist.send(x, 1)
            answer.wait()
        else:
            dist.recv(x, 0)
            dist.send(x, 0)


def exchanged(x):
    """Three exchanges; both ranks post their receives before their sends."""
    other = 1 - dist.get_rank()
    for _ in range(3):
        answer = dist.irecv(torch.empty_like(x), other)
        dist.send(x, other)
        answer.wait()


def sent_in_a_thread(x):
    """Three exchanges; each sends in a thread and receives meanwhile, or after its receive has ended."""
    other = 1 - dist.get_rank()
    for _ in range(3):
        thread = threading.Thread(target=dist.send, args=(x, other))
        thread.start()
        dist.recv(torch.empty_like(x), other)
        thread.join()


def test_a_send_in_a_thread_waits_for_no_receive_of_its_step():
    assert steps_of(sent_in_a_thread) == 3


def test_a_receive_counts_where_it_is_waited_for():
    assert steps_of(posted_first) == 6
    assert steps_of(exchanged) == 3


# --- problems for paper ----------------------------------------------------------------------------------------------

_PROBLEM = {
    "cases": [(12, 3), (20, 5), (7, 2)],
    "units": ["s", "bytes"],
    "hints": {"product": "Divide.", "half": "Twice."},
}
_SLIPS = {"product": "size / rate  ->  size * rate", "half": "2 * size  ->  size"}


@paper_problem("Exercise 1", slips=_SLIPS, **_PROBLEM)
def problem(size, rate):
    """Check ``fn(size, rate)``."""
    return size / rate, 2 * size


def test_a_formula_is_the_check_of_itself(capsys):
    problem(lambda size, rate: (size / rate, 2 * size))
    assert capsys.readouterr().out == "Exercise 1 passed: 4 s, 24 bytes.\n"
    assert "fn" in problem.__annotations__ and problem.__name__ == "problem" and problem.__doc__.startswith("Check")


@pytest.mark.parametrize(
    "result",
    [
        lambda s, b: [s, b],
        lambda s, b: (Fraction(s), np.float32(b)),
        lambda s, b: np.array([s, b]),
        lambda s, b: torch.tensor([s, b]),
        lambda s, b: (torch.tensor(s), np.array(b)),
        lambda s, b: (np.float64(s), np.int64(b)),
    ],
)
def test_numbers_of_any_type_are_numbers(result):
    problem(lambda size, rate: result(size / rate, 2 * size))


@pytest.mark.parametrize("result", [None, "4", {}, [1], [1, 2, 3], np.ones((2, 1)), ("a", 1), 1j])
def test_anything_else_is_no_number(result):
    assert refusal(problem, lambda size, rate: result).hint == "number"


def test_wrong_answers_to_a_problem_get_the_hint_of_their_slip():
    assert refusal(problem, lambda size, rate: (size * rate, 2 * size)).hint == "product"
    assert refusal(problem, lambda size, rate: (size / rate, size)).hint == "half"
    assert refusal(problem, lambda size, rate: (size, size)).hint == "numbers"
    assert refusal(problem, lambda size, rate: (4, 24)).hint == "typed"


def test_a_table_of_the_cases_does_not_pass():
    table = {case: problem.formula(*case) for case in problem.cases}
    assert refusal(problem, lambda *case: table[case]).hint == "error"
    assert refusal(problem, lambda *case: table.get(case, (1, 1))).hint == "drawn"


def test_a_problem_can_say_which_cases_may_be_drawn():
    def drawn_with(**how) -> list[tuple]:
        seen = []

        @paper_problem("Exercise 1", slips={}, **_PROBLEM | how)
        def formula(size, rate):
            return size / rate, 2 * size

        def answer(*case):
            seen.append(case)
            return case[0] / case[1], 2 * case[0]

        formula(answer)
        return seen[3:]

    for _ in range(10):
        ((size, rate),) = drawn_with(allowed=lambda size, rate: size % rate == 0 or size == 7)
        assert (size, rate) not in _PROBLEM["cases"] and (size % rate == 0 or size == 7)
    assert drawn_with(draw=lambda rng: (100, 10)) == [(100, 10)]
    assert drawn_with(draw=lambda rng: None) == []
    assert drawn_with(allowed=lambda size, rate: False) == []


def test_an_edit_that_does_not_fit_is_an_error_of_the_table():
    @paper_problem("Exercise 1", slips={"product": "width / rate  ->  1"}, **_PROBLEM)
    def formula(size, rate):
        return size / rate, 2 * size

    with pytest.raises(EditError):
        checks.wrong_formulas(formula)


@pytest.mark.parametrize("name", PAPER)
def test_each_slip_of_a_problem_gets_its_own_hint(name):
    check = PAPER[name]
    assert check.hints.keys() <= check.slips.keys() | checks.COMMON_HINTS.keys() | formulas._HINTS.keys()
    for hint, wrongs in checks.wrong_formulas(check).items():
        for number, wrong in enumerate(wrongs):
            error = refusal(check, wrong)
            assert error.hint == hint, (hint, number, str(error))


@pytest.mark.parametrize("name", PAPER)
def test_slips_with_different_hints_differ_in_some_case(name):
    check = PAPER[name]
    results = {
        (hint, number): [formulas._result(wrong, case) for case in check.cases]
        for hint, wrongs in checks.wrong_formulas(check).items()
        for number, wrong in enumerate(wrongs)
    }
    for (one, first), (other, second) in itertools.combinations(results.items(), 2):
        same = all(a and b and formulas._agree(a, b, check.tolerance) for a, b in zip(first, second, strict=True))
        assert one[0] == other[0] or not same, (one, other)


@pytest.mark.parametrize("name", PAPER)
def test_drawn_cases_can_be_computed(name):
    check = PAPER[name]
    for seed in range(20):
        check(check.formula)
        case = formulas.draw_mixed(check.formula, check.cases, random.Random(seed))
        assert case is None or case not in check.cases


# --- hints -----------------------------------------------------------------------------------------------------------

def loaded(tmp_path: Path, text: str) -> dict:
    (tmp_path / "topic.toml").write_text(text)
    return read_hints(tmp_path / "topic.toml")


def test_hints_of_a_family_are_those_of_each_that_extends_it(tmp_path):
    text = '[_family]\nshared = """One\n  text."""\nown = "No."\n[a]\nextends = ["family"]\nown = "Yes."\n[b]\nx = "X."'
    assert loaded(tmp_path, text) == {"a": {"shared": "One text.", "own": "Yes."}, "b": {"x": "X."}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nextends = ["b"]', "extends"),
        ('[_b]\nx = "X."\n[a]\ny = "Y."', "no exercise extends b"),
        ('[a]\nx = 3', "no hint"),
        ('[a]\nx = " "', "no hint"),
        ('[a]\nextend = ["b"]', "no hint"),
        ('[a]\nX_y = "X."', "no hint"),
        ('x = "X."', "outside of the tables"),
        ("[a", "topic.toml"),
        ('[a]\nx = "1"\nx = "2"', "topic.toml"),
    ],
)
def test_a_file_of_hints_with_a_mistake_is_refused(tmp_path, text, message):
    with pytest.raises(HintError, match=message):
        loaded(tmp_path, text)


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_right_numbers_of_another_type_are_refused_where_one_is_promised():
    exercise, ones = Exercise("Exercise 1", {}), torch.ones(2)
    exercise.equal(0, ones, ones.double())
    assert refusal(exercise.equal, 0, ones, ones.double(), dtype=torch.float64).hint == "dtype"
    exercise.equal(0, ones.double(), ones.double(), dtype=torch.float64)


def test_the_slip_that_explains_a_result_is_the_first_that_is_the_same():
    slips = {"half": [1, 2], "double": 2, "none": []}
    assert [slip_of(slips, lambda wrong, n=n: wrong == n, "value") for n in (1, 2, 3)] == ["half", "half", "value"]


def test_tensors_that_are_to_be_exact_are_refused_with_the_hint_that_fits():
    exercise, right = Exercise("Exercise 1", {"float32": "Digits.", "sum": "Divide."}), torch.arange(1, 4).double() / 3

    def compared(got, **slips):
        compare_tensor(exercise, got, right, slips, "it")

    compared(right.clone())
    for hint, got in {"float32": right.float(), "sum": 3 * right, "value": 2 * right, "shape": right[:2]}.items():
        assert refusal(compared, got, sum=[None, 3 * right]).hint == hint
    named = refusal(compare, exercise, 1, {"w": 3 * right}, {"w": right}, {"sum": {"w": 3 * right}}, "the weight")
    assert named.hint == "sum" and named.rank == 1 and "the weight of w is wrong.\n  one process" in str(named)


def test_nan_is_right_where_it_is_expected_and_nowhere_else():
    number, nan = torch.tensor([1.0]), torch.tensor([torch.nan])
    assert [checks.close(a, b) for a in (number, nan) for b in (number, nan)] == [True, False, False, True]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_an_input_that_was_changed_is_told_from_one_that_holds_nan(kind):
    def unchanged(before, after):
        Exercise("Exercise 1", {}).keeps_input(0, Outcome(None, [], before, after))

    x = torch.tensor([0, 1]).to(kind)
    unchanged(x, x.clone())
    assert refusal(unchanged, x, 1 - x.long()).hint == "input-changed"
    assert refusal(unchanged, x, x[:1]).hint == "input-changed"
    if x.is_floating_point():
        unchanged(x / 0, x / 0)
        assert refusal(unchanged, x / 0, x).hint == "input-changed"


def test_numbers_may_be_of_any_type():
    for half in (0.5, Fraction(1, 2), np.float32(0.5), torch.tensor(0.5), np.array(0.5)):
        assert checks.number(half) == 0.5 and type(checks.number(half)) is float
    assert checks.number(np.int64(3)) == 3.0
    for other in (True, None, "0.5", torch.tensor([0.5]), 1j, torch.tensor(True)):
        assert checks.number(other) is None


def test_whole_numbers_may_be_of_any_type():
    for three in (3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        assert checks.whole_number(three) == 3 and type(checks.whole_number(three)) is int
    for other in (3.0, True, None, "3", torch.tensor(3.0), torch.tensor([3]), torch.tensor(True)):
        assert checks.whole_number(other) is None
    for listed in ([1, 2], (1, np.int64(2)), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])):
        assert checks.whole_numbers(listed) == [1, 2]
    for other in ([1, 2.0], 3, "12", {1, 2}, np.ones((2, 2), int), np.array([1.0, 2.0]), None):
        assert checks.whole_numbers(other) is None
