"""What a process with endpoints measures, under the names of Dynamo 1.5.1, and how it is told."""
