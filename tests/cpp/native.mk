# The core's own tests, without Python: plain, under sanitizers, for ARM, fuzzed.

NATIVE_CPP := $(wildcard tests/cpp/*.cpp tests/cpp/*.h)
NATIVE_CXX ?= $(if $(filter default,$(origin CXX)),g++,$(CXX))
ARM_CXX    ?= aarch64-linux-gnu-g++
ARM_RUN    ?= qemu-aarch64
FUZZ_CXX   ?= clang++
FUZZ_CORPUS ?= build/cpp/corpus
SECONDS    ?= 60

NATIVE_CORE := $(basename $(notdir $(wildcard csrc/core/*.cpp csrc/core/policies/*.cpp)))
NATIVE_CPU  := $(basename $(notdir $(wildcard csrc/cpu/*.cpp)))
NATIVE_TILES := tile_kernels_model tile_kernels_processor
NATIVE_OBJECTS_tests  := $(NATIVE_CORE) $(NATIVE_CPU) $(NATIVE_TILES) noted_kv main \
                         $(basename $(notdir $(wildcard tests/cpp/*_test.cpp)))
NATIVE_OBJECTS_kernels := $(NATIVE_CPU) $(NATIVE_TILES) main amx_test isas_test
NATIVE_OBJECTS_stress := $(NATIVE_CORE) noted_kv stress
NATIVE_OBJECTS_replay := $(NATIVE_CORE) noted_kv play play_verbs play_checks replay
NATIVE_OBJECTS_fuzz   := $(NATIVE_CORE) noted_kv play play_verbs play_checks fuzz
NATIVE_FLAGS := -std=c++20 -g -ffp-contract=off -Icsrc/include -Itests/cpp -Wall -Wextra -Werror -pthread -MMD -MP
# A finding ends the process, so that it fails the target.
NATIVE_CHECKED := -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS

vpath %.cpp csrc/core csrc/core/policies csrc/cpu tests/cpp

# $(call native_build,name,compiler,flags,programs): the programs, as build/cpp/<name>/<program>
define native_build
build/cpp/$(1)/%.o: %.cpp tests/cpp/native.mk
	@mkdir -p $$(@D)
	@echo "$(2) $(1)/$$*"
	@$(2) $(NATIVE_FLAGS) $(3) $$(OBJECT_FLAGS) -c $$< -o $$@
$(foreach program,$(4),$(call native_link,$(1),$(2),$(3),$(program)))
-include $(wildcard build/cpp/$(1)/*.d)
endef
define native_link

build/cpp/$(1)/$(4): $(NATIVE_OBJECTS_$(4):%=build/cpp/$(1)/%.o)
	@$(2) $(3) -pthread $$^ -o $$@
endef

NATIVE_PROGRAMS := tests stress replay
$(eval $(call native_build,plain,$(NATIVE_CXX),-O2,$(NATIVE_PROGRAMS)))
$(eval $(call native_build,tsan,$(NATIVE_CXX),$(NATIVE_CHECKED) -fsanitize=thread,$(NATIVE_PROGRAMS)))
$(eval $(call native_build,asan,$(NATIVE_CXX),$(NATIVE_CHECKED) -fsanitize=address$(comma)undefined,$(NATIVE_PROGRAMS)))
$(eval $(call native_build,arm,$(ARM_CXX),-O2 -static,$(NATIVE_PROGRAMS)))
# Without UndefinedBehaviorSanitizer, which costs more inputs than it would find among them.
$(eval $(call native_build,fuzz,$(FUZZ_CXX),-O2 -D_GLIBCXX_ASSERTIONS -fsanitize=fuzzer$(comma)address,fuzz))
# All of it may use AVX-512, the model of the tile registers too, so that its numbers can be compared bit by bit.
AVX512_FLAGS := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -Wno-maybe-uninitialized -Wno-uninitialized
$(eval $(call native_build,emulated,$(NATIVE_CXX),-O2 -static $(AVX512_FLAGS),kernels))
# What is to be covered is the core.
$(addprefix build/cpp/fuzz/,play.o play_verbs.o play_checks.o noted_kv.o): OBJECT_FLAGS := -fno-sanitize=fuzzer
# What single files need on x86-64, as in setup.py.
ifeq ($(shell uname -m),x86_64)
$(patsubst %,build/cpp/%/kernels_avx2.o,plain tsan asan): OBJECT_FLAGS := -mavx2 -mfma -mf16c
$(patsubst %,build/cpp/%/kernels_avx512.o,plain tsan asan): OBJECT_FLAGS := $(AVX512_FLAGS)
$(patsubst %,build/cpp/%/kernels_avx512_bf16.o,plain tsan asan): OBJECT_FLAGS := $(AVX512_FLAGS) -mavx512bf16
$(patsubst %,build/cpp/%/kernels_amx.o,plain tsan asan): OBJECT_FLAGS := $(AVX512_FLAGS)
endif
# $(call native,name): compiles what is out of date, side by side
native = @$(MAKE) --no-print-directory --jobs=$$(nproc) $(NATIVE_PROGRAMS:%=build/cpp/$(1)/%)

.PHONY: native test-cpp tsan asan-cpp arm emulate-x86 fuzz need-arm need-fuzz

native: test-cpp tsan asan-cpp
	@if $(MAKE) --silent need-arm; then $(MAKE) arm; else echo "make arm: skipped"; fi

test-cpp: ## Run the core's C++ tests
	$(call native,plain)
	build/cpp/plain/tests
	build/cpp/plain/stress
	build/cpp/plain/replay --random 20000

tsan: ## Run the core's C++ tests under ThreadSanitizer
	$(call native,tsan)
	build/cpp/tsan/tests
	build/cpp/tsan/stress
	build/cpp/tsan/replay --random 500

asan-cpp: ## Run the core's C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call native,asan)
	build/cpp/asan/tests
	build/cpp/asan/stress
	build/cpp/asan/replay --random 5000

need-arm:
	$(call need,command -v $(ARM_CXX),A compiler for ARM is needed: on Debian apt install g++-aarch64-linux-gnu$(comma) \
	  or set ARM_CXX.)
	$(call need,command -v $(ARM_RUN),An ARM emulator is needed: on Debian apt install qemu-user$(comma) or set ARM_RUN.)

arm: need-arm ## Cross-compile the core's C++ tests for 64-bit ARM and run them in an emulator
	$(call native,arm)
	EXPECTED_SHA256_PATH=armv8-sha2 $(ARM_RUN) build/cpp/arm/tests
	$(ARM_RUN) build/cpp/arm/stress 4 50
	$(ARM_RUN) build/cpp/arm/replay --random 1000

emulate-x86: ## Run the CPU kernels' C++ tests with AVX-512 and AMX, on an emulated processor
	@if [ "$$(uname -m)" = x86_64 ]; then \
	  $(MAKE) --no-print-directory --jobs=$$(nproc) build/cpp/emulated/kernels && \
	  $(PYTHON) tests/cpp/emulate/emulate.py build/cpp/emulated/kernels; \
	else echo "make emulate-x86: skipped: it is built on x86-64 only"; fi

need-fuzz:
	$(call need,command -v $(FUZZ_CXX),clang++ is needed: on Debian apt install clang libclang-rt-dev$(comma) or set FUZZ_CXX.)

fuzz: need-fuzz ## Fuzz the pool's verbs for SECONDS (60); what is found is kept in build/cpp
	@$(MAKE) --no-print-directory --jobs=$$(nproc) build/cpp/fuzz/fuzz build/cpp/plain/replay
	@mkdir -p $(FUZZ_CORPUS)
	build/cpp/plain/replay --write $(FUZZ_CORPUS) 100
	build/cpp/fuzz/fuzz -max_total_time=$(SECONDS) -max_len=1024 -print_final_stats=1 \
	  -artifact_prefix=build/cpp/ $(FUZZ_CORPUS)
