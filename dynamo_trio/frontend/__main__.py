"""``python -m dynamo_trio.frontend``: an HTTP frontend for the workers that discovery shows."""

from dynamo_trio.process import signals

signals.install()  # before anything that takes time is imported

if __name__ == "__main__":
    from dynamo_trio.frontend.main import main

    main()
