"""The program ``python -m dynamo_trio``: frontend, router and worker in one process."""
