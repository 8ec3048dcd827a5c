"""What the launcher for Kubernetes submits and `ortflow render` prints: the documents of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.payload import FILES, Payload
from ortflow.workflow.errors import UserError

_CLAIM_OUT = """\
The claim {claim} is not in this file: `kubectl delete -f` would delete it and every checkpoint on it.
If the namespace lacks it, make it once: ortflow render -b kubernetes --with-claim RUN_FILE | kubectl apply -f -
To delete it and the checkpoints: kubectl delete pvc {claim}"""
_CLAIM_IN = """\
The claim {claim} is in this file: `kubectl delete -f` deletes it and every checkpoint on it."""


ANNOTATIONS = 256 * 1024
"""Bytes of an object's annotations that the API server accepts. `kubectl apply` puts the whole object into one."""


@dataclass(frozen=True)
class KubernetesRequest:
    """The documents of a run."""

    submission: Submission
    payload: Payload
    with_claim: bool = False
    """Print the claim of `volume.create`, too."""

    def documents(self, suffix: str | None, namespace: str | None, *, new_budget: bool) -> list[dict[str, Any]]:
        """The documents as sent; `suffix` makes the job's name unique."""
        from ortflow.manifests.kubernetes import Placement, documents

        placement = Placement(
            suffix=suffix, new_budget=new_budget, fresh=self.submission.fresh, namespace=namespace,
            contents=self.payload.contents,
        )  # fmt: skip
        return documents(self.payload.source, self.payload.spec, placement)

    def __str__(self) -> str:
        """The documents, without the claim unless requested: deleting the file's objects then keeps the data.

        Raises UserError if `kubectl apply` would create only some of them.
        """
        from ortflow.manifests.kubernetes import dump, without_claim

        documents = self.documents(None, None, new_budget=self.submission.new_budget)
        _refuse_what_apply_cannot(documents)
        remaining_documents, claim = without_claim(documents)
        text = dump(documents if self.with_claim else remaining_documents).rstrip("\n")
        if claim is None:
            return text
        comment = _CLAIM_IN if self.with_claim else _CLAIM_OUT
        return "\n".join([*(f"# {line}" for line in comment.format(claim=claim).splitlines()), text])


def _refuse_what_apply_cannot(documents: Sequence[dict[str, Any]]) -> None:
    for document in documents:
        size = applied_size(document)
        if size > ANNOTATIONS:
            raise UserError(
                f"make the {document['kind']} {size // 1024} KiB large as `kubectl apply` writes it, which refuses it "
                f"above {ANNOTATIONS // 1024} KiB and creates the run's other objects",
                where=FILES,
                fix="start the run with `ortflow submit` or the chart, or put the large files on the volume",
            )


def applied_size(document: dict[str, Any]) -> int:
    """Bytes of the annotation in which `kubectl apply` keeps a document, with the others. Pure."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    # Go's encoder also escapes these, as six letters each.
    escaped = sum(map(text.count, "<>&\u2028\u2029"))
    annotations = document["metadata"].get("annotations") or {}
    return len(text.encode()) + 5 * escaped + sum(len(key) + len(value) for key, value in annotations.items()) + 64
