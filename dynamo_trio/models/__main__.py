"""``python -m dynamo_trio.models``: the cached default model by hand."""

from dynamo_trio.process import signals

signals.install()  # before anything that takes time is imported

if __name__ == "__main__":
    import sys

    from dynamo_trio.models.cli import main

    sys.exit(main(cancel=signals.stop_pending))
