"""``python -m dynamo_trio.worker``: a worker, which serves its model to frontends."""

from dynamo_trio.process import signals

signals.install()  # before anything that takes time is imported

if __name__ == "__main__":
    from dynamo_trio.worker.main import main

    main()
