"""A small engine that serves a GPT on many ranks: a cache in blocks, a scheduler, and one step of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_utils.models import GPT


@dataclass(eq=False)
class Request:
    """A prompt, and how many new tokens somebody waits for."""

    name: Hashable
    prompt: Sequence[int]
    new: int
    tokens: list[int] = field(default_factory=list)  # the prompt, and what has been generated
    table: list[int] = field(default_factory=list)  # its blocks, in order
    done: int = 0  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def left(self) -> int:
        """Tokens that have to be computed before the next one can be chosen: 1 in decode, more in prefill."""
        return len(self.tokens) - self.done

    @property
    def finished(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.new


class Blocks:
    """Which blocks of the cache are free, how many requests use each, and which prefixes are in them."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.users, self.free = size, [0] * count, deque(range(count))
        self.block_of, self.prefix_of = {}, {}  # a prefix that ends with a full block -> that block, and back

    def take(self) -> int:
        """A free block, the one that has been free for longest; what it held is forgotten."""
        block = self.free.popleft()
        self.block_of.pop(self.prefix_of.pop(block, ()), None)
        self.users[block] = 1
        return block

    def give_back(self, table: Sequence[int]) -> None:
        """One user less; what nobody uses is free, the end of a prefix before its beginning."""
        for block in reversed(table):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix, with one user more; at least one token is left to compute."""
        table: list[int] = []
        for end in range(self.size, len(tokens), self.size):
            block = self.block_of.get(tuple(tokens[:end]))
            if block is None:
                break
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
            table.append(block)
        return table

    def remember(self, request: Request) -> None:
        """Let others find the full blocks of a request by the tokens up to their end."""
        for i, block in enumerate(request.table[: request.done // self.size]):
            prefix = tuple(request.tokens[: (i + 1) * self.size])
            if block not in self.prefix_of and prefix not in self.block_of:
                self.block_of[prefix], self.prefix_of[block] = block, prefix


class Scheduler:
    """Which tokens of which requests the next step computes: at most `budget` tokens of `most` requests."""

    def __init__(self, blocks: Blocks, budget: int, most: int) -> None:
        self.blocks, self.budget, self.most = blocks, budget, most
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.put_back = 0  # times that blocks ran out

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run is refused with a `ValueError`."""
        room, asked = len(self.blocks.users) * self.blocks.size, len(request.prompt) + request.new
        if not request.prompt or request.new < 1 or asked > room:
            raise ValueError(f"a request has a prompt, new tokens, and {room} tokens at most in all; got {asked}")
        self.waiting.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """Requests, and how many tokens of each: decodes first, then prompts in pieces, then who waits."""
        batch, left, put_back = [], self.budget, self.put_back
        for request in sorted(self.running, key=lambda request: request.left):
            count = min(left, request.left)
            if count and request in self.running and self.extend(request, count):
                batch.append((request, count))
                left -= count
        while self.waiting and left and len(self.running) < self.most and self.put_back == put_back:
            request = self.waiting[0]
            request.table = self.blocks.known(request.tokens)
            request.done = len(request.table) * self.blocks.size
            count = min(left, request.left)
            if self.missing(request, count) > len(self.blocks.free):
                self.release(request)
                break
            self.running.append(self.waiting.popleft())
            self.extend(request, count)
            batch.append((request, count))
            left -= count
        return [(request, count) for request, count in batch if request.table]

    def missing(self, request: Request, count: int) -> int:
        """Blocks that a request lacks for so many more tokens."""
        return -(-(request.done + count) // self.blocks.size) - len(request.table)

    def extend(self, request: Request, count: int) -> bool:
        """Give a request blocks; where there are none, the youngest goes back to the queue and starts again later."""
        while self.missing(request, count) > len(self.blocks.free):
            youngest = self.running.pop()
            self.release(youngest)
            self.waiting.appendleft(youngest)
            self.put_back += 1
            if youngest is request:
                return False
        request.table += [self.blocks.take() for _ in range(self.missing(request, count))]
        return True

    def release(self, request: Request) -> None:
        self.blocks.give_back(request.table)
        request.table, request.done = [], 0

    def advance(self, batch: Sequence[tuple[Request, int]], chosen: Sequence[int]) -> list[Request]:
        """Take in what a step chose for each request of its batch; return those that got a token."""
        got = []
        for (request, count), token in zip(batch, chosen, strict=True):
            request.done += count
            self.blocks.remember(request)
            if not request.left:
                request.tokens.append(token)
                got.append(request)
                if request.finished:
                    self.cancel(request.name)
        return got

    def cancel(self, name: Hashable) -> None:
        """Forget a request, wherever it is."""
        for queue in (self.running, self.waiting):
            for request in [request for request in queue if request.name == name]:
                queue.remove(request)
                self.release(request)


class PagedGPT:
    """The heads and inner features of a GPT that this rank has, and its part of the cache; all, unless `shared`."""

    def __init__(self, model: GPT, blocks: int, size: int, shared: bool = True) -> None:
        n, rank = (dist.get_world_size(), dist.get_rank()) if shared and dist.is_initialized() else (1, 0)
        self.n, self.size, self.model, heads = n, size, model, model.config.heads
        if heads % n:
            raise ValueError(f"{n} ranks do not divide the {heads} heads of the model")
        self.layers = []
        for block in model.blocks:
            attention, mlp = block.attention, block.mlp
            weight, bias = (p.unflatten(0, (3, n, -1))[:, rank].flatten(0, 1) for p in attention.qkv.parameters())
            up, up_bias = (p.chunk(n)[rank] for p in mlp.up.parameters())
            out, down = (layer.weight.chunk(n, 1)[rank] for layer in (attention.out, mlp.down))
            self.layers.append((block, weight, bias, out, up, up_bias, down))
        shape = (len(self.layers), 2, blocks * size, heads // n, model.config.hidden // heads)
        self.cache = model.embedding.weight.new_zeros(shape)

    def slots(self, table: Sequence[int], tokens: int) -> Tensor:
        """Where the first so many tokens of a request lie in the cache."""
        starts = self.size * torch.tensor(table, device=self.cache.device)
        return (starts[:, None] + torch.arange(self.size, device=self.cache.device)).flatten()[:tokens]

    @torch.no_grad()
    def step(self, batch: Sequence[tuple[Request, int]]) -> Tensor:
        """Compute the planned tokens, and return the logits after the last one of each request: (requests, V)."""
        counts = [count for _, count in batch]
        tokens = [token for request, count in batch for token in request.tokens[request.done : request.done + count]]
        where = [self.slots(request.table, request.done + count) for request, count in batch]
        positions = torch.cat([torch.arange(len(w) - c, len(w)) for w, c in zip(where, counts, strict=True)])
        tokens, positions = torch.tensor(tokens).to(self.cache.device), positions.to(self.cache.device)
        x = self.model.embedding(tokens) + self.model.position(positions)
        for cache, (block, weight, bias, out, up, up_bias, down) in zip(self.cache, self.layers, strict=True):
            q, k, v = F.linear(block.norm1(x), weight, bias).unflatten(-1, (3, *cache.shape[2:])).unbind(1)
            cache[:, torch.cat([w[-c:] for w, c in zip(where, counts, strict=True)])] = torch.stack([k, v])
            mixed = torch.cat([attend(*own) for own in zip(q.split(counts), where, [cache] * len(where), strict=True)])
            x = x + self.total(F.linear(mixed.flatten(1), out)) + block.attention.out.bias
            x = x + self.total(F.linear(F.gelu(F.linear(block.norm2(x), up, up_bias)), down)) + block.mlp.down.bias
        return self.model.head(self.model.norm(x[torch.tensor(counts).cumsum(0) - 1]))

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, once in attention and once in the MLP of each layer."""
        if self.n > 1:
            dist.all_reduce(x)
        return x


def attend(q: Tensor, where: Tensor, cache: Tensor) -> Tensor:
    """Attention of a request's new tokens (count, heads, size) to all of its tokens in the cache."""
    k, v = cache[:, where].transpose(1, 2)
    keep = torch.ones(len(q), len(where), dtype=torch.bool, device=q.device).tril(len(where) - len(q))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=keep).transpose(0, 1)


class Engine:
    """Requests that come and go, on all ranks: the same calls in the same order on each of them."""

    def __init__(self, model: GPT, blocks=24, size=4, budget=16, most=8, shared=True) -> None:
        self.context = model.config.context
        self.scheduler = Scheduler(Blocks(blocks, size), budget, most)
        self.model, self.steps, self.computed = PagedGPT(model, blocks, size, shared), 0, 0

    def add(self, request: Request) -> None:
        if (asked := len(request.prompt) + request.new) > self.context:
            raise ValueError(f"the model's context is {self.context} tokens; got {asked}")
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Plan, compute and choose; return the requests that got a token. Rank 0 chooses for all."""
        batch = self.scheduler.plan()
        if not batch:
            return []
        chosen = self.model.step(batch).argmax(-1)
        if self.model.n > 1:
            dist.broadcast(chosen, 0)
        self.steps, self.computed = self.steps + 1, self.computed + sum(count for _, count in batch)
        return self.scheduler.advance(batch, chosen.tolist())

    def run(self) -> None:
        """Step until nobody waits."""
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
