"""One kernel for a hand-in, spoken to over sockets in its own folder: run a cell, run a check, end all of it."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import write_connection_file

from .sandbox import Room

__all__ = ["Died", "Session"]

GRACE = 10.0  # seconds that an interrupted cell has to end


class Died(Exception):
    """The kernel is gone: it ended, or it ignored an interrupt and was ended."""


class Session:
    """A kernel in a `Room`; see :meth:`start`."""

    def __init__(self, room: Room, process: asyncio.subprocess.Process, client: AsyncKernelClient) -> None:
        self._room, self._process, self._client = room, process, client

    @classmethod
    async def start(cls, room: Room, imports: str, patience: float, seconds: float) -> Session:
        """Start a kernel and have it import what checks need.

        Raises
        ------
        RuntimeError
            It did not start, or the checks cannot be imported: the fault is not the hand-in's.
        """
        name = room.home / f".kernel-{secrets.token_hex(4)}"
        write_connection_file(str(name), ip=f"{name}-s", transport="ipc", key=secrets.token_hex(32).encode())
        if room.user is not None:
            os.chown(name, room.user, room.user)
        arguments = ["-m", "course_utils.grading.kernel", "-f", str(name), "--HistoryManager.enabled=False"]
        with (room.home / ".kernel.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *room.command([*arguments, "--IPKernelApp.log_level=40"]), env=room.environment(), cwd=room.home,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )
        client = AsyncKernelClient()
        client.load_connection_file(str(name))
        client.start_channels(iopub=False, stdin=False, hb=False)
        session = cls(room, process, client)
        try:
            reply = await session._ask(imports, seconds, {"task": "prepare", "patience": patience})
            fault = reply.get("grading", {"error": "no answer from the kernel"}).get("error")
        except Died:
            fault = (room.home / ".kernel.log").read_text(errors="replace") or "it ended"
        except BaseException:
            await session.end()
            raise
        if fault:
            await session.end()
            raise RuntimeError(f"no kernel for the checks: {fault.strip()[-2000:]}")
        return session

    async def run(self, source: str, seconds: float) -> tuple[str, bool]:
        """Run a cell; return its error in one line, empty if there is none, and whether it was interrupted.

        Raises
        ------
        Died
            The kernel has ended.
        """
        reply = await self._ask(source, seconds)
        error = "" if reply["status"] == "ok" else f"{reply.get('ename', 'Error')}: {reply.get('evalue', '')}"
        return error.partition("\n")[0][:200], reply["interrupted"]

    async def check(self, source: str, answers: list[str], seconds: float) -> dict[str, Any]:
        """Run a check; return what :meth:`GradingKernel.check` found. Raises `Died`."""
        reply = await self._ask(source, seconds, {"task": "check", "answers": answers})
        verdict = reply["grading"]
        if "error" in verdict:
            verdict = {"passed": False, "message": verdict["error"], "hint": "", "slow": reply["interrupted"]}
        if reply["interrupted"] and not verdict["passed"]:
            message = f"The check had not ended after {seconds:g} s.\n\n{verdict['message']}"
            verdict |= {"slow": True, "message": message}
        return verdict

    async def end(self) -> list[str]:
        """End the kernel with all its processes; return the commands of those that the hand-in had left behind."""
        left = await asyncio.to_thread(self._room.end)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._client.stop_channels()
        return left

    async def _ask(self, code: str, seconds: float, task: dict[str, Any] | None = None) -> dict[str, Any]:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
                   "stop_on_error": False}
        message = self._client.session.msg("execute_request", content, metadata={"grading": task} if task else {})
        self._client.shell_channel.send(message)
        reply = await self._reply(message["header"]["msg_id"], seconds)
        if reply is not None:
            return reply | {"interrupted": False}
        self._client.control_channel.send(self._client.session.msg("interrupt_request", {}))
        reply = await self._reply(message["header"]["msg_id"], GRACE)
        if reply is not None:
            return reply | {"interrupted": True}
        with suppress(ProcessLookupError):
            self._process.kill()
        raise Died

    async def _reply(self, identity: str, seconds: float) -> dict[str, Any] | None:
        """The content of the reply to a message; None if there is none in time. Raises `Died`."""

        async def answer() -> dict[str, Any]:
            while True:
                message = await self._client.shell_channel.get_msg()
                if message["parent_header"].get("msg_id") == identity:
                    return message["content"]

        waiting = {asyncio.ensure_future(answer()), asyncio.ensure_future(self._process.wait())}
        try:
            done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        results = [task.result() for task in done]
        content = next((result for result in results if isinstance(result, dict)), None)
        if content is None and done:
            raise Died
        return content
