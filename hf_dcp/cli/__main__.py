"""`python -m hf_dcp.cli`, for launchers that start modules: `torchrun -m hf_dcp.cli bench attention ...`."""

from hf_dcp.cli.main import main

if __name__ == "__main__":
    main()
