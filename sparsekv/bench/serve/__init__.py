"""`sparsekv bench serve`: requests against a running vLLM, dense and sparse, at equal KV memory.

    plan      what is measured: modes (an engine each) and workloads (what is sent to it)
    load      sends a workload to an engine and notes when its tokens came
    steps     what the engine says of its own steps
    figures   from both, the figures of a row
    session   all workloads of one engine, in turn
    worker    a process: one vLLM engine, one session
    processes starts workers, one at a time, and follows what they report
    record    rows, kept after each workload

Prompts are random token ids that share no prefix, prefix caching is off in every mode, and every
answer has exactly the asked length.
"""
