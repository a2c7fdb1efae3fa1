"""The command line, `hf-dcp`."""

from hf_dcp.cli.main import main

__all__ = ["main"]
