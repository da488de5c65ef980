"""TLS on both planes, with certificates of both sides, between NVIDIA's make and ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trustme

from tests.interop.load import CHAT
from tests.interop.scene import axes
from tests.standalone.harness import chat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.scene import Scene


@pytest.fixture
def mutual_tls(tmp_path: Path) -> dict[str, str]:
    """One certificate for everybody, and nobody is trusted without one."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "::1", "localhost")
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    certificate.private_key_pem.write_to_path(key)
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(cert, append=number > 0)
    return {
        **{"DYN_TCP_TLS_CERT_PATH": cert, "DYN_TCP_TLS_KEY_PATH": key},
        **{"DYN_TCP_TLS_CLIENT_CERT_PATH": cert, "DYN_TCP_TLS_CLIENT_KEY_PATH": key},
        **{"DYN_TCP_TLS_CA_CERT_PATH": ca, "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": ca},
    }


@axes(0)
def test_their_frontend_and_our_worker(scene: Scene, mutual_tls: dict[str, str]) -> None:
    model = scene.model()
    worker = scene.our_worker(model, **mutual_tls)
    frontend = scene.their_own_frontend(**mutual_tls)
    frontend.wait_model(model, worker.process)
    streamed = frontend.ask("POST", CHAT, chat(12, model=model.name))
    unary = frontend.ask("POST", CHAT, chat(12, model=model.name, stream=False)).json()
    assert streamed.is_done
    assert streamed.text == unary["choices"][0]["message"]["content"]

    plain = scene.their_frontend
    plain.wait_model(model, worker.process)
    assert plain.ask("POST", CHAT, chat(12, model=model.name)).status >= 500


@axes(1)
def test_our_frontend_and_their_mocker(scene: Scene, mutual_tls: dict[str, str]) -> None:
    model = scene.model()
    mocker = scene.their_mocker(model, **mutual_tls)
    frontend = scene.our_frontend(**mutual_tls)
    frontend.wait_model(model, mocker)
    answer = frontend.ask("POST", CHAT, chat(12, model=model.name, stream=False)).json()
    assert answer["usage"]["completion_tokens"] == 12
