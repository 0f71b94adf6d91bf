"""NCCL's settings, which it reads from the environment once, and what its log says that it chose. No jax."""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from giantjax.network import Transport


def export_transport(transport: Transport, environment: MutableMapping[str, str]) -> str:
    """Set the variables of `transport` where the user has not; which, in words."""
    wanted = transport.environment()
    kept = {name: environment[name] for name, value in wanted.items() if environment.get(name, value) != value}
    exported = {name: value for name, value in wanted.items() if name not in kept}
    environment.update(exported)
    said = in_words(exported) or "nothing"
    return said + (f"; {in_words(kept)} stays as it was set" if kept else "")


def in_words(variables: Mapping[str, str]) -> str:
    """`NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS=4`."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def listen(folder: Path, environment: MutableMapping[str, str]) -> Path | None:
    """Have NCCL log to a file in `folder`; None where the user has asked for its log already."""
    if environment.get("NCCL_DEBUG"):
        return None
    path = folder / "nccl.log"
    environment.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)})
    return path


@dataclass(frozen=True)
class Choice:
    """What NCCL uses, as far as its log tells."""

    version: str | None
    network: str | None
    """`Socket`, `IB`, or a plugin's own name."""
    cards: tuple[str, ...]
    """Interfaces such as eth0, or cards such as mlx5_0:1/RoCE, that channels to other nodes use."""
    threads: int | None
    sockets: int | None
    """A thread."""
    direct: bool
    """Whether cards reach GPU memory."""
    inside: tuple[str, ...]
    """How GPUs of a node reach each other, such as P2P/CUMEM or SHM/direct/direct."""
    crosses: bool
    """Whether any channel leaves the node."""

    def __str__(self) -> str:
        cards = ", ".join(self.cards[:4]) + (", ..." if len(self.cards) > 4 else "")
        words = []
        if self.network and (self.crosses or not self.inside):
            said = self.network + (f" over {cards}" if cards else "")
            said += f", {self.threads} threads x {self.sockets} sockets" if self.network == "Socket" and self.threads else ""
            words.append(said + (", straight from GPU memory" if self.direct else ""))
        if self.inside:
            words.append(f"{' and '.join(self.inside)} inside a node")
        return f"NCCL: {'; '.join(words)}"


def parse_log(text: str) -> Choice | None:
    """The choice that a log of NCCL with NCCL_DEBUG_SUBSYS=INIT,NET tells of; None where it tells of no network and no channel.

    The lines are those of src/init.cc, src/transport/net_socket.cc, net_ib.cc, net.cc and p2p.cc of github.com/NVIDIA/nccl, 2.4 to 2.28.
    """
    version = re.search(r"NCCL version ([0-9.]+)", text)
    network = _last(r"NCCL INFO Using network (\S+)", text)
    used = {int(number) for number in re.findall(r" via NET/[^/\s]+/([0-9]+)", text)}
    inside = dict.fromkeys(re.findall(r" via ((?:P2P|SHM)\S*)", text))
    threads = re.findall(r"NET/Socket ?: Using ([0-9]+) threads and ([0-9]+) sockets per thread", text)
    if network is None and not inside and not used:
        return None
    plugin = "Socket" if network == "Socket" else "IB"
    listed = _last(rf"NCCL INFO NET/{plugin} ?: Using (\[.*)", text) or ""
    named = re.findall(r"\[([0-9]+)\]([^\s\[{;]+)", listed.partition(";")[0] if plugin == "IB" else listed)
    cards = {int(number): name.partition(":")[0] if plugin == "Socket" else name for number, name in named}
    return Choice(
        version[1] if version else None,
        network,
        tuple(name for number, name in cards.items() if not used & cards.keys() or number in used),
        int(threads[-1][0]) if threads else None,
        int(threads[-1][1]) if threads else None,
        "/GDRDMA" in text,
        tuple(inside),
        bool(used),
    )


def read_log(path: Path) -> str | None:
    """One line for the user out of the log; None where there is none, or it says nothing."""
    try:
        choice = parse_log(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return str(choice) if choice else None


def _last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None
