"""`python -m fedlens` is the command `fedlens`."""

from fedlens.cli.main import main

if __name__ == "__main__":
    main()
