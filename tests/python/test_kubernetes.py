"""The manifests in examples/kubernetes: against the schemas of the API, the commands in them against the real command, and their ports,
names and volumes against each other."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from children import environment

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "kubernetes"
#: The newest API that there are schemas of, and an older one that clusters still run.
VERSIONS = ("1.30", "1.37")
Manifest = dict[str, Any]


def load(file: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


MANIFESTS = [manifest for file in sorted(FOLDER.glob("*.yaml")) for manifest in load(file)]
PODS = {m["metadata"]["name"]: m["spec"]["template"] for m in MANIFESTS if "template" in m.get("spec", {})}


def named(kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == kind}


def containers(pod: str) -> dict[str, Manifest]:
    return {container["name"]: container for container in PODS[pod]["spec"]["containers"]}


def commands() -> Iterator[list[str]]:
    """Every command in a container or a probe."""
    for pod in PODS:
        for container in containers(pod).values():
            yield container["command"]
            for key, value in container.items():
                if key.endswith("Probe") and "exec" in value:
                    yield value["exec"]["command"]


def flag(words: list[str], name: str) -> str:
    (value,) = (word.partition("=")[2] for word in words if word.startswith(f"--{name}="))
    return value


def ports(text: str) -> set[int]:
    first, _, last = text.partition("-")
    return set(range(int(first), int(last or first) + 1))


def listening(pod: str) -> set[int]:
    """Every port on which the containers of a pod listen, as their commands and variables say."""
    found: set[int] = set()
    for container in containers(pod).values():
        words = container["command"]
        found |= {
            p
            for name in ("ports", "port", "relay-ports")
            for w in words
            if w.startswith(f"--{name}=")
            for p in ports(w.partition("=")[2])
        }
        for variable in container.get("env", []):
            if variable["name"] == "WEIGHTS_PORTS":
                found |= ports(variable["value"])
        for word in words:
            if word.startswith("--rdzv-endpoint="):
                found.add(int(word.rpartition(":")[2]))
    return found


def test_manifests_are_what_the_api_takes_and_nothing_else() -> None:
    kinds = {manifest["kind"] for manifest in MANIFESTS}
    assert kinds == {"Secret", "Service", "Deployment", "StatefulSet", "NetworkPolicy"}
    for version in VERSIONS:
        for manifest in MANIFESTS:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_field_that_is_misspelt_at_any_depth_is_refused(manifest: Manifest) -> None:
    def places(value: Any, free: bool = False) -> Iterator[Manifest]:
        """Every object of the manifest whose keys are not free, as those of labels are."""
        if isinstance(value, list):
            for each in value:
                yield from places(each)
        elif isinstance(value, dict) and not free:
            yield value
            for key, each in value.items():
                yield from places(
                    each, key in {"labels", "matchLabels", "selector", "stringData", "requests", "limits"}
                )

    wrong = copy.deepcopy(manifest)
    found = list(places(wrong))
    assert found
    for place in found:
        place["mispelt"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
        del place["mispelt"]
    kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_command_takes_every_flag_in_the_manifests() -> None:
    ours = [words for words in commands() if words[0] == "windlass"]
    assert sorted(words[1] for words in ours) == ["controller", "inspect", "receive"]
    for words in ours:
        done = windlass("config", *words[1:])
        assert done.returncode == 0, (words, done.stderr)
    done = windlass("config", *ours[0][1:], "--no-such-flag=1")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


def windlass(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windlass", *words],
        env=environment() | {"WINDLASS_CONFIG": "none"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ports_of_services_probes_and_policies_are_those_that_are_listened_on() -> None:
    pods = {template["metadata"]["labels"]["app"]: name for name, template in PODS.items()}
    reached: dict[str, set[int]] = {name: set() for name in PODS}
    for service in named("Service").values():
        pod = pods[service["selector"]["app"]]
        for port in service["ports"]:
            assert port.get("targetPort", port["port"]) in listening(pod), (pod, port)
    for policy in named("NetworkPolicy").values():
        pod = pods[policy["podSelector"]["matchLabels"]["app"]]
        for rule in policy["ingress"]:
            for port in rule.get("ports", []):
                reached[pod] |= ports(f"{port['port']}-{port.get('endPort', port['port'])}")
            for peer in rule["from"]:
                selector = peer["podSelector"]
                asked = (
                    [selector["matchLabels"]["app"]]
                    if "matchLabels" in selector
                    else selector["matchExpressions"][0]["values"]
                )
                assert set(asked) <= set(pods)
    # Between the ranks of the trainer everything is open, the rendezvous too.
    assert reached == {name: listening(name) - {29500} for name in PODS}
    for pod in PODS:
        for container in containers(pod).values():
            declared = {port["containerPort"] for port in container.get("ports", [])}
            assert declared <= listening(pod)
            for key in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(key, {}):
                    assert container[key]["httpGet"]["port"] in declared


def test_names_tokens_and_memory_of_the_manifests_fit_each_other() -> None:
    receive = containers("engine")["windlass"]["command"]
    services = named("Service")
    variables = {v["name"]: v.get("value") for v in containers("trainer")["trainer"]["env"]}
    for url in (flag(receive, "controller"), variables["WINDLASS_CONTROLLER"]):
        host, port = re.fullmatch(r"http://([a-z]+):(\d+)", url or "").groups()  # type: ignore[union-attr]
        assert int(port) in {each["port"] for each in services[host]["ports"]}
    control = containers("controller")["controller"]["command"]
    assert flag(control, "advertise-host") in services
    assert flag(control, "set").partition("=")[2] == flag(receive, "model")
    # A pod that serves an image has one process namespace, one user and one /dev/shm.
    engine = PODS["engine"]["spec"]
    assert engine["shareProcessNamespace"] is True
    assert engine["securityContext"]["runAsUser"] == 1000
    assert all("securityContext" not in container for container in engine["containers"])
    for pod in ("engine", "trainer"):
        (shm,) = (volume["emptyDir"] for volume in PODS[pod]["spec"]["volumes"] if "emptyDir" in volume)
        assert shm["medium"] == "Memory"
        assert shm["sizeLimit"]
        for container in containers(pod).values():
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    # Every pod has the token of the one secret, as a file that its group may read.
    (secret,) = (m for m in MANIFESTS if m["kind"] == "Secret")
    for template in PODS.values():
        (token,) = (volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume)
        assert token == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
    assert secret["stringData"] == {"token": ""}
    assert f"secret generic {secret['metadata']['name']} " in (ROOT / "docs/kubernetes.md").read_text()


def test_the_placeholder_of_the_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    done = windlass("controller", "--json", f"--token-file={tmp_path / 'token'}")
    assert done.returncode == 2
    assert "token" in json.loads(done.stdout.splitlines()[-1])["error"]["message"]
