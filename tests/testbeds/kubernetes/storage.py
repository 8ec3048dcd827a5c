"""The cluster's shared storage: storage.py PKI API_SERVER FOLDER. A folder of the machine that all nodes see, like NFS.

A claim of the class `shared`, which is the default one, gets FOLDER/NAMESPACE/CLAIM; when the claim is deleted, so is
the folder. The volumes static-1 … static-3 have no class and lie at FOLDER/static-N; they are emptied and released
after use.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from api import Api, Failed

CLASS = "shared"
PROVISIONER = "testbed.ortflow.dev/shared"
MODES = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]
STATIC = 3
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


class Storage:
    """Reconciles claims and volumes, one pass after the other."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api, self._folder = api, folder

    def prepare(self) -> None:
        """Create the class and the static volumes if they do not exist."""
        if not any(one["metadata"]["name"] == CLASS for one in self._api.items(CLASSES)):
            default = {"storageclass.kubernetes.io/is-default-class": "true"}
            meta = {"name": CLASS, "annotations": default}
            self._api("POST", CLASSES, {"metadata": meta, "provisioner": PROVISIONER, "reclaimPolicy": "Delete"})
        there = {one["metadata"]["name"] for one in self._api.items(VOLUMES)}
        for number in range(1, STATIC + 1):
            name = f"static-{number}"
            if name not in there:
                self._make(name, self._folder / name, {"persistentVolumeReclaimPolicy": "Retain"}, "10Gi", {})

    def look(self) -> None:
        """Give each new claim its volume, and reclaim volumes whose claim is gone."""
        volumes = {one["metadata"]["name"]: one for one in self._api.items(VOLUMES)}
        for claim in self._api.items(CLAIMS):
            meta, spec = claim["metadata"], claim["spec"]
            name = f"pvc-{meta['uid']}"
            if spec.get("storageClassName") == CLASS and not spec.get("volumeName") and name not in volumes:
                path = self._folder / meta["namespace"] / meta["name"]
                owner = {key: meta[key] for key in ("namespace", "name", "uid")}
                bound = {"storageClassName": CLASS, "persistentVolumeReclaimPolicy": "Delete", "claimRef": owner}
                by = {"pv.kubernetes.io/provisioned-by": PROVISIONER}
                self._make(name, path, bound, spec["resources"]["requests"]["storage"], by)
        for name, volume in volumes.items():
            if volume.get("status", {}).get("phase") == "Released":
                self._take_back(name, volume)

    def _make(self, name: str, path: Path, more: dict[str, Any], size: str, annotations: dict[str, str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        where = {"hostPath": {"path": str(path), "type": "Directory"}, "accessModes": MODES}
        spec = {"capacity": {"storage": size}, **where, **more}
        self._api("POST", VOLUMES, {"metadata": {"name": name, "annotations": annotations}, "spec": spec})

    def _take_back(self, name: str, volume: dict[str, Any]) -> None:
        path = Path(volume["spec"]["hostPath"]["path"])
        shutil.rmtree(path, ignore_errors=True)
        if volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
            self._api("DELETE", f"{VOLUMES}/{name}")
            return
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        self._api("PATCH", f"{VOLUMES}/{name}", {"spec": {"claimRef": None}}, "application/merge-patch+json")


def main() -> None:
    """Serve until killed; nothing changes while the API server is away."""
    pki, server, folder = sys.argv[1:4]
    storage = Storage(Api(pki, server), Path(folder))
    prepared = False
    while True:
        try:
            if not prepared:
                storage.prepare()
                prepared = True
            storage.look()
        except Failed as error:
            print(error, flush=True)
        time.sleep(0.25)


main()
