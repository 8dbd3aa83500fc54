"""SeaweedFS with a key for each role, whose policies are printed by `weightwire policy`.

SeaweedFS enforces the policies of `--portable`: actions, resources and `s3:prefix`. It does not know the condition
`s3:if-none-match` (and then refuses), and answers 404 for any missing object. `amazon()` is a proxy in front of it that
enforces the full policies and answers as Amazon S3 does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.commands import weightwire
from support.iam_policies import AuthorizingProxy
from support.stores import SeaweedFS, environment

__all__ = ["KEYS", "RoleKeys", "policy_of"]

KEYS: Mapping[str, tuple[str, ...]] = {
    "publisher": ("publisher",),
    "gpu-0": ("follower", "--name", "gpu-0"),
    "gpu-1": ("follower", "--name", "gpu-1"),
    "silent": ("follower",),
    "blind": ("follower",),  # without list permission
    "gc": ("gc",),
    "reader": ("reader",),
}
"""Key -> the arguments of its policy."""


def policy_of(key: str, url: str, *options: str) -> dict[str, Any]:
    role, *names = KEYS[key]
    ran = weightwire("policy", role, url, *names, *options)
    assert ran.code == 0, ran.err
    policy: dict[str, Any] = json.loads(ran.out)
    if key == "blind":
        policy["Statement"] = [one for one in policy["Statement"] if one["Sid"] != "List"]
    return policy


class RoleKeys(SeaweedFS):
    """Every key is for the run at `run_url`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.run_url = self.url("team/run")
        config = json.loads((root / "s3.json").read_text())
        config["policies"] = []
        for key in KEYS:
            credentials = [{"accessKey": f"{key}-key", "secretKey": f"{key}-secret"}]
            config["identities"].append({"name": key, "credentials": credentials, "actions": [], "policyNames": [key]})
            content = json.dumps(policy_of(key, self.run_url, "--portable"))
            config["policies"].append({"name": key, "content": content})
        (root / "s3.json").write_text(json.dumps(config))

    def amazon(self) -> AuthorizingProxy:
        return AuthorizingProxy(self.endpoint, policies={f"{key}-key": policy_of(key, self.run_url) for key in KEYS})

    def through(self, endpoint: str, key: str) -> dict[str, str]:
        return environment(endpoint, f"{key}-key", f"{key}-secret")
