"""The exercises on NCCL's algorithms: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import wrong_nccl
from exercise_cases import ExerciseTests

from course_utils.checks import message_steps
from course_utils.checks import nccl as nccl
from course_utils.ranks import Entry

pytestmark = pytest.mark.guard(60)


class TestNccl(ExerciseTests):
    checks, mutants = nccl, wrong_nccl

    def given(self, name: str):
        """The broken function of the text, which no marker names."""
        cell = next(code for _, code in self.cells() if f"def {name}(" in code)
        names = dict(self.answer("ring_all_reduce").__globals__)
        exec(cell.split("\n\n\n")[0], names)
        return names[name]

    def test_the_given_ring_is_broken_as_the_text_says(self):
        error = self.refusal("mended_ring_all_reduce", self.given("broken_ring_all_reduce"))
        assert error.hint == "tail"
        assert "2 ranks, 11 numbers" in str(error)

    @pytest.mark.parametrize("send_then_receive", [True, False])
    def test_any_way_to_start_both_messages_passes(self, send_then_receive):
        def gather(x, ring):
            n, place = len(ring), ring.index(dist.get_rank())
            chunks = x.tensor_split(n)
            for step in range(n - 1):
                out, into, left, right = (place + step) % n, (place + step + 1) % n, ring[place - 1], (place + 1) % n
                if send_then_receive:
                    request = dist.isend(chunks[out], left)
                    dist.recv(chunks[into], ring[right])
                else:
                    request = dist.irecv(chunks[into], ring[right])
                    dist.send(chunks[out], left)
                request.wait()

        nccl.ring_all_gather(gather, timeout=30.0)

    def test_padding_to_a_multiple_of_the_ranks_passes(self):
        whole = self.answer("ring_all_reduce")

        def padded(x, ring):
            flat = torch.cat([x.flatten(), x.new_zeros(-x.numel() % len(ring))])
            return whole(flat, ring)[: x.numel()].reshape(x.shape)

        nccl.ring_all_reduce(padded, timeout=30.0)

    def test_tree_of_other_shape_but_as_few_steps_passes(self):
        def halves(x, root):
            """Places in the upper half send to the lower half, and so on; the same backwards."""
            rank, n = dist.get_rank(), dist.get_world_size()
            place, total, received, partners = (rank - root) % n, x.clone(), torch.empty_like(x), []
            while n > 1:
                half = (n + 1) // 2
                if place < half:
                    partners += [rank + half] * (place + half < n)
                    n = half
                else:
                    partners.append(rank - half)
                    break
            world, parent = dist.get_world_size(), partners.pop() if place else None
            for child in partners:
                dist.recv(received, child % world)
                total += received
            if parent is not None:
                dist.send(total, parent % world)
                dist.recv(total, parent % world)
            for child in reversed(partners):
                dist.send(total, child % world)
            return total

        nccl.tree_all_reduce(halves, timeout=30.0)

    def test_wrong_whole_numbers_are_shown_in_full(self):
        wrong = next(m for m in wrong_nccl.MUTANTS if m.answer.__name__ == "in_float32_and_back")
        text = str(self.refusal(wrong.exercise, wrong.answer))
        assert "12 numbers of dtype int64" in text
        expected, got = re.findall(r"(?:expected|got) +shape \(6,\): (\d{13})", text)
        assert expected != got

    def test_wrong_name_is_refused_with_both_names(self):
        error = self.refusal("pick_algorithm", lambda *case: ("ring", 1.0))
        assert re.search(r"expected  root, [-\d.e]+ s\n  got       ring, 1 s", str(error))


def ledgers(*ranks: str) -> list[list[Entry]]:
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("r1 s1", "r0 s0"), 1),  # both started at once, the receive first
        (("r2 s1 r2 s1", "r0 s2 r0 s2", "r1 s0 r1 s0"), 2),  # two turns of a ring
        (("s1 r2 s1 r2", "r0 s2 r0 s2", "r1 s0 r1 s0"), 6),  # really one after another
    ],
)
def test_sends_started_with_a_receive_do_not_wait_for_it(ranks, steps):
    assert message_steps(ledgers(*ranks)) == steps
