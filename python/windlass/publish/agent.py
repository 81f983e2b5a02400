"""The agent of a trainer: how the configuration starts it, and what is said of it in errors.

Owns: what :class:`windlass.publish.supervise.AgentSupervisor` is given. Called by :class:`windlass.WeightManager`.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from windlass.config import StoreConfig
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.publish.supervise import AgentSupervisor

if TYPE_CHECKING:
    from windlass.config import WeightManagerConfig

__all__ = ["about_agent", "check_reachable", "start_agent"]


def start_agent(
    config: WeightManagerConfig, region: str, peers: list[str], ports: tuple[str, str] | None
) -> AgentSupervisor | None:
    """The agent of a region, unless the configuration wants none. ``ports`` are those of the agent before it."""
    agent = config.agent
    if not agent.enabled:
        return None
    is_any = ipaddress.ip_address(agent.bind).is_unspecified
    return AgentSupervisor(
        region,
        bind=agent.bind,
        advertise_host=agent.advertise_host or (socket.gethostname() if is_any else None),
        ports=ports[0] if ports else agent.ports,
        data_ports=ports[1] if ports else agent.data_ports,
        token_file=agent.token_file,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_ca=config.tls_ca,
        history=agent.history,
        history_bytes=agent.history_bytes,
        check_every=agent.check_every,
        relay_from=agent.relay_from,
        nixl=agent.nixl,
        nixl_library=agent.nixl_library,
        nixl_params=agent.nixl_params,
        threads=agent.threads,
        streams=config.engine.streams,
        timeout=config.engine.timeout,
        peers=peers,
        log=agent.log,
        options=_store_options(config.store),
    )


def _store_options(store: StoreConfig | str | None) -> list[str]:
    if not isinstance(store, StoreConfig):
        return []
    values = {
        "--store": store.url,
        "--store-anchor-every": store.anchor_every,
        "--store-keep": store.keep,
        "--store-keep-hours": store.keep_hours,
        "--store-keep-bytes": store.keep_bytes,
        "--store-bandwidth": store.bandwidth,
        "--store-part-bytes": store.part_bytes,
        "--store-streams": store.streams,
    }
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def check_reachable(config: WeightManagerConfig, hosts: set[str]) -> None:
    """Sees that the agents of several hosts can reach each other, and that each has what it is to upload."""
    if len(hosts) > 1 and config.store is not None:
        raise WindlassUnsupported(
            f"the weights are on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and a store takes the whole model from one",
            "leave store out, and upload from a host that has the whole model",
        )
    bind = config.agent.bind
    if len(hosts) > 1 and config.agent.enabled and ipaddress.ip_address(bind).is_loopback:
        raise WindlassInvalid(
            f"the weights are on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and agents bound to "
            f"{bind} cannot reach each other",
            'set agent.bind to an address of this host, or to "0.0.0.0"',
        )


def about_agent(config: WeightManagerConfig, agent: AgentSupervisor | None) -> str:
    """How the agent is, for an error."""
    if agent is not None:
        status = agent.status()
        state = f"runs as pid {status['pid']}" if status["running"] else "does not run"
        said = f", last error: {status['last_error']}" if status["last_error"] else ""
        return f"the agent {state} after {status['restarts']} restarts{said}; its log is {status['log']}"
    if not config.agent.enabled:
        return "no agent was started, since agent.enabled is False; run `windlass agent` for the region"
    return "rank 0 has the agent and knows more"
