"""``python -m curvlens`` is the command ``curvlens``."""

from curvlens.cli import app

if __name__ == "__main__":
    app(prog_name="curvlens")
