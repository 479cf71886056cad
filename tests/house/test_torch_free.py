"""The control plane imports with torch, triton and safetensors blocked: what import-linter cannot see (re-exports, strings)."""

import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib, pkgutil, sys, traceback

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "safetensors"}:
            raise ImportError(f"{name} is blocked: the control plane is torch-free")

sys.meta_path.insert(0, Blocked())
broken = []
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
            importlib.import_module(found.name)
    except ImportError:
        broken.append(name + ": " + traceback.format_exc().strip().splitlines()[-1])
print("\\n".join(broken))
"""


def control_plane() -> list[str]:
    """The source modules of the import contract; one list for both."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return contracts["importlinter:contract:control-plane"]["source_modules"].split()


def broken_imports(*names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_every_control_plane_module_imports_without_torch() -> None:
    names = control_plane()
    assert len(names) >= 12
    assert broken_imports(*names) == ""


def test_starting_a_server_costs_its_process_no_torch() -> None:
    """The command line composes both halves; what ``serve`` imports on its side of the wire is torch-free all the same."""
    commands = [
        f"flashstep.cli.{name}" for name in ("serve", "generate", "chat", "check", "budget", "kernels")
    ]
    assert broken_imports(*commands, "flashstep.engine.launch", "flashstep.server.app") == ""


def test_the_probe_would_notice() -> None:
    assert "torch is blocked" in broken_imports("flashstep.kernels")
