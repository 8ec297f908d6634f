"""`python -m sparsekv` is the `sparsekv` command."""

from sparsekv.cli import main

if __name__ == "__main__":
    main()
