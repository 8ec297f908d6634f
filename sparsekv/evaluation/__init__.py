"""Evaluation: tasks, both protocols, paired differences with intervals, bytes and time beside."""
