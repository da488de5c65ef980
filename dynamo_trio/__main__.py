"""``python -m dynamo_trio``: everything in one process."""

from dynamo_trio.process import signals

signals.install()  # before anything that takes time is imported

if __name__ == "__main__":
    from dynamo_trio.standalone.main import main

    main()
