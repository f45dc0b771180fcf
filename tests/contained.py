"""Run a command as in a container: `python tests/contained.py COMMAND …` makes no namespace and has 64 MB of /dev/shm.

Docker's default profile refuses these system calls to a process without CAP_SYS_ADMIN, and clone3 as if there were none
(https://docs.docker.com/engine/security/seccomp). Only root can make /dev/shm smaller first.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# Of each architecture, as <linux/audit.h> and <asm/unistd.h> number them: itself, unshare, setns, mount, clone.
CALLS = {"x86_64": (0xC000003E, 272, 308, 165, 56), "aarch64": (0xC00000B7, 97, 268, 40, 220)}
CLONE3, NEW_NAMESPACES, NEW_MOUNTS = 435, 0x7E020000, 0x20000
LOAD, IF_EQUAL, IF_ANY, RETURN = 0x20, 0x15, 0x45, 0x06  # of the filter's language
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SET_FILTER = 38, 22  # for prctl
PRIVATE = 0x44000  # a mount that nobody else sees, and all below it


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.unshare(NEW_MOUNTS) == 0:
        libc.mount(b"none", b"/", None, PRIVATE, None)
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m")
    architecture, *refused, clone = CALLS[platform.machine()]
    steps = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, FAIL | errno.EPERM), (LOAD, 0, 0, 0)]
    for call, number in (*((call, errno.EPERM) for call in refused), (CLONE3, errno.ENOSYS)):
        steps += [(IF_EQUAL, 0, 1, call), (RETURN, 0, 0, FAIL | number)]
    steps += [(IF_EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (IF_ANY, 0, 1, NEW_NAMESPACES)]
    steps += [(RETURN, 0, 0, FAIL | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    for command in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_FILTER, 2, filter, 0, 0)):
        if libc.prctl(*command):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
