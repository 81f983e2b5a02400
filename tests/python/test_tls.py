"""TLS from Python: managers and controllers with certificates, receivers and clients that trust some and not others.

The certificates are those of ``tls/make.sh``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from controlled import PATIENCE, world
from models import policy
from test_strategies_tcp import Engine, Kept, config
from windlass import (
    Controller,
    Receiver,
    WeightManager,
    WeightSyncManager,
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassTimeout,
    strategy_from_config,
)
from windlass.extract import ModuleWeightExtractor
from windlass.http import HttpClient
from windlass.transfer.client import InferenceEngineClient

pytestmark = pytest.mark.timeout(180)

MADE = Path(__file__).parent / "tls"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tls-") as folder:
        # Git keeps no modes, and keys that everybody can read are refused.
        for key in MADE.glob("*.key"):
            shutil.copy(key, folder)
            os.chmod(Path(folder) / key.name, 0o600)
        yield Path(folder)


def server(home: Path, name: str = "server") -> dict[str, Any]:
    return {"tls_cert": str(MADE / f"{name}.pem"), "tls_key": str(home / f"{name}.key")}


CA, OTHER = str(MADE / "ca.pem"), str(MADE / "other.pem")


def weights(step: int) -> dict[str, torch.Tensor]:
    values = torch.zeros(1 << 16, dtype=torch.bfloat16)
    values[:step] = 1.0
    return {"w": values}


def refusal(make: Any) -> WindlassError:
    with pytest.raises(WindlassError) as caught:
        make()
    return caught.value


def test_a_receiver_follows_a_manager_with_a_certificate_and_refuses_what_it_does_not_trust(
    home: Path,
) -> None:
    with WeightManager(region_dir=str(home), timeout=60.0, **server(home)) as wm:
        wm.offload(weights(1), 1, 0, 1)
        wm.wait_delta_ready(timeout=PATIENCE)
        endpoint = wm.endpoint
        assert endpoint is not None
        assert endpoint.startswith("https://127.0.0.1:")
        at: dict[str, Any] = {"endpoint": endpoint, "token_file": wm.token_file, "timeout": 20.0}
        with Receiver(home / "images", tls_ca=CA, **at) as receiver:
            assert receiver.wait(1, timeout=PATIENCE)["mode"] == "full"
            wm.offload(weights(2), 2, 0, 1)
            assert receiver.wait(2, timeout=PATIENCE)["mode"] == "delta"
            with receiver.hold() as image:
                assert image.tensors["w"].equal(weights(2)["w"])
        error = refusal(lambda: Receiver(home / "others", tls_ca=OTHER, **at))
        assert isinstance(error, WindlassDenied), error
        assert "tls_ca" in str(error)
        named = {**at, "endpoint": endpoint.replace("127.0.0.1", "localhost")}
        Receiver(home / "others", tls_ca=CA, **named).close()
        plain = {**at, "endpoint": endpoint.replace("https", "http")}
        error = refusal(lambda: Receiver(home / "others", tls_ca=CA, **plain))
        assert isinstance(error, WindlassInvalid), error
        assert "https://" in str(error)
        for ca, kind in (
            (str(home / "absent"), WindlassNotFound),
            (str(home / "server.key"), WindlassInvalid),
        ):
            error = refusal(lambda ca=ca: Receiver(home / "others", tls_ca=ca, **at))
            assert isinstance(error, kind), error
            assert ca in str(error)


def test_a_certificate_for_another_host_keeps_the_agent_from_starting_and_says_why(home: Path) -> None:
    with WeightManager(region_dir=str(home), timeout=60.0, **server(home, "elsewhere")) as wm:
        wm.offload(weights(1), 1, 0, 1)
        error = refusal(lambda: wm.endpoint)
        assert isinstance(error, (WindlassInvalid, WindlassTimeout)), error
        assert "subject alternative names" in str(error)


def test_a_certificate_and_its_key_are_given_together() -> None:
    error = refusal(lambda: WeightManager(tls_cert="server.pem"))
    assert isinstance(error, WindlassInvalid)
    assert "tls_key" in str(error)


def test_a_controller_with_a_certificate_is_told_and_asked_over_tls(home: Path) -> None:
    options = [f"--tls-cert={MADE / 'server.pem'}", f"--tls-key={home / 'server.key'}"]
    with world(home, *options) as there:
        assert there.url.startswith("https://127.0.0.1:")
        there.receiver("r1", "policy", f"--tls-ca={CA}")
        fields: dict[str, Any] = {
            "region_dir": str(home),
            "controller": there.url,
            "controller_token_file": str(there.token_file),
            "agent": {"token_file": str(there.token_file)},
            "timeout": 60.0,
            "tls_ca": CA,
            **server(home),
        }
        with WeightManager(**fields) as wm:
            for step in (1, 2):
                wm.offload(weights(step), step, 0, 1)
                told = wm.notify_version(sync=True, timeout=PATIENCE)
                assert told is not None
                assert told.served is not None
                assert told.served.version == step
        controller = Controller(there.url, token_file=there.token_file, tls_ca=CA)
        # It goes to data loaders' processes.
        served = pickle.loads(pickle.dumps(controller)).gate(2, timeout=PATIENCE)
        assert served.version == 2
        stranger = Controller(there.url, token_file=there.token_file, tls_ca=OTHER)
        error = refusal(lambda: stranger.service_version())
        assert isinstance(error, WindlassDenied)
        assert error.name == "untrusted_certificate"
        plain = Controller(there.url.replace("https", "http"), token_file=there.token_file)
        error = refusal(lambda: plain.service_version())
        assert "https://" in str(error)


def test_the_environment_names_whom_to_trust(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"--tls-cert={MADE / 'server.pem'}", f"--tls-key={home / 'server.key'}"]
    with world(home, "--set=main=policy", *options) as there:
        monkeypatch.setenv("WINDLASS_TLS_CA", CA)
        assert Controller(there.url, token_file=there.token_file).service_version() is None
        monkeypatch.setenv("WINDLASS_TLS_CA", OTHER)
        error = refusal(lambda: Controller(there.url, token_file=there.token_file).service_version())
        assert isinstance(error, WindlassDenied)


def test_a_strategy_over_tcp_takes_the_certificates_of_its_manager(home: Path) -> None:
    settings = config(home, manager={"region_dir": str(home), "tls_ca": CA, **server(home)})

    async def run() -> None:
        loader = Kept()
        client = InferenceEngineClient([Engine(settings, loader)], prefix_cache="keep")
        strategy = strategy_from_config(settings)
        assert strategy.create_sync_info().endpoints[0].startswith("https://127.0.0.1:")
        manager = WeightSyncManager(strategy, ModuleWeightExtractor(), client)
        await manager.initialize()
        model = policy()
        assert await manager.sync_weights(model, "bfloat16") == 1
        assert loader.tensors
        await client.aclose()
        manager.close()

    asyncio.run(run())


class Shop:
    """An HTTPS server that answers every request with an empty object."""

    def __init__(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._run, args=(context,))
        self._thread.start()

    def _run(self, context: ssl.SSLContext) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            plain.settimeout(10)
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    self.heard.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}")
            except OSError:
                plain.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.mark.parametrize(
    ("name", "host", "ca", "why"),
    [
        ("server", "127.0.0.1", OTHER, "unable to get local issuer|self-signed"),
        ("server", "127.0.0.1", None, "unable to get local issuer|self-signed"),
        ("elsewhere", "127.0.0.1", CA, "mismatch"),
        ("elsewhere", "localhost", CA, "mismatch"),
        ("expired", "127.0.0.1", CA, "expired"),
    ],
)
def test_the_http_client_sends_nothing_to_whom_it_does_not_trust(
    home: Path, name: str, host: str, ca: str | None, why: str
) -> None:
    shop = Shop(MADE / f"{name}.pem", home / f"{name}.key")
    try:
        client = HttpClient(f"https://{host}:{shop.port}", token="secret", tls_ca=ca, timeout=10)
        with pytest.raises(WindlassDenied, match=why) as caught:
            client.get("/x", stage="look")
        assert caught.value.name == "untrusted_certificate"
        assert "tls_ca" in str(caught.value.advice)
        assert shop.heard == []
    finally:
        shop.close()


def test_the_http_client_asks_over_tls_and_names_what_is_none(home: Path) -> None:
    shop = Shop(MADE / "server.pem", home / "server.key")
    try:
        for host in ("127.0.0.1", "localhost"):
            client = HttpClient(f"https://{host}:{shop.port}", token="secret", tls_ca=CA, timeout=10)
            assert client.get("/x", stage="look").object() == {}
        assert all(b"Bearer secret" in heard for heard in shop.heard)
        assert len(shop.heard) == 2
    finally:
        shop.close()
    error = refusal(lambda: HttpClient("https://127.0.0.1:9", tls_ca=str(home / "absent")))
    assert isinstance(error, WindlassNotFound)
    error = refusal(lambda: HttpClient("https://127.0.0.1:9", tls_ca=str(home / "server.key")))
    assert isinstance(error, WindlassInvalid)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        client = HttpClient(f"https://127.0.0.1:{listener.getsockname()[1]}", tls_ca=CA, timeout=10)
        with pytest.raises(WindlassInvalid, match="does not speak TLS"):
            client.get("/x", stage="look")
        thread.join(10)
