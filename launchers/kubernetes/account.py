"""The account of a pod's user in /etc/passwd. Used by the launcher pod and the workers before anything of ssh starts.

ssh and sshd refuse a user without one. OpenShift and other clusters give each namespace a range of user ids, which no
image knows; an image lets group 0, in which their pods are, add an account.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from ortflow.workflow.errors import UserError

PASSWD = Path("/etc/passwd")


def ensure_account(home: Path, passwd: Path = PASSWD) -> None:
    """Add an account for this process's user, if it has none. Raises UserError if the image does not allow it."""
    uid, gid = os.getuid(), os.getgid()
    if _known(uid):
        return
    try:
        with passwd.open("a") as file:
            file.write(entry(uid, gid, home))
    except OSError as error:
        raise UserError(
            f"uid {uid} has no account in the image, which ssh needs, and gid {gid} cannot add one to {passwd}: "
            f"{error.strerror}",
            where="backends.kubernetes.security.run_as_user",
            fix="use a user of the image, or run_as_group: 0 with an image in which group 0 may write /etc/passwd, "
            "as in that of ortflow's Dockerfile",
        ) from error
    # The container runtime has set it to / for an unknown user.
    os.environ["HOME"] = str(home)


def _known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def entry(uid: int, gid: int, home: Path) -> str:
    """The line of an account. The name is the same in every pod: ssh logs in with it. Pure."""
    return f"ortflow-{uid}:x:{uid}:{gid}:ortflow:{home}:/bin/sh\n"
