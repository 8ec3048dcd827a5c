"""The Kubernetes documents of a run: an MPIJob and the objects that it needs.

Pure: nothing is queried, sent or read here. `ortflow render --backend kubernetes` prints the documents, and the
launcher sends the same ones. A test compares them with those of the chart, which is written by hand.
"""

from ortflow.manifests.kubernetes.documents import Placement, documents, job_name, without_claim
from ortflow.manifests.kubernetes.dump import dump

__all__ = ["Placement", "documents", "dump", "job_name", "without_claim"]
