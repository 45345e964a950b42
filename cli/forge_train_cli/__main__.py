"""`python -m forge_train_cli` is `forge`."""

from . import main

if __name__ == "__main__":
    main()
