"""`python -m hf_dcp.cli`."""

from hf_dcp.cli.main import main

main()
