# Other engines, an environment for each; and options of a benchmark, such as BENCH="--rows warm cold".
PEERS ?= $(VENV)-peers
BENCH ?=

.PHONY: bench-pool bench-attention bench-hf bench-e2e bench-peers

bench-pool: $(VENV)/package.stamp ## Time the pool against its bounds, and against other engines where they are there
	$(PY) -m benchmarks.pool --peers $(PEERS) $(BENCH)

bench-attention: $(VENV)/package.stamp ## Time attention over pages against its bounds, torch and the machine's limits
	$(PY) -m benchmarks.attention --peers $(PEERS) $(BENCH)

bench-hf: $(VENV)/test.stamp ## Time generate of transformers with a session beside its own cache
	$(PY) -m benchmarks.hf $(BENCH)

bench-e2e: $(VENV)/test.stamp ## Time whole requests of the demo's model beside transformers, vLLM and llama.cpp
	$(PY) -m benchmarks.e2e --peers $(PEERS) $(BENCH)

bench-peers: $(PEERS)/vllm.stamp $(PEERS)/sglang.stamp $(PEERS)/llamacpp.stamp ## Get the engines to compare with (5 GB) and time them alone
	@$(PEERS)/vllm/bin/python -m benchmarks.peers.vllm_manager
	@$(PEERS)/vllm/bin/python -m benchmarks.peers.vllm_attention
	@$(PEERS)/sglang/bin/python -m benchmarks.peers.sglang_tree

# Every package is pinned and none is asked what else it wants: the engines' own requirements are a GPU's.
$(PEERS)/%.stamp: benchmarks/peers/%.txt | $(VENV)/venv.stamp
	@echo "Installing $* into $(PEERS)/$*. This takes some minutes, once." >&2
	@rm -rf $(PEERS)/$*
	@$(PYTHON) -m venv $(PEERS)/$*
	@$(PEERS)/$*/bin/python -m pip install --quiet $(PIP_PIN)
	@$(PEERS)/$*/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@
