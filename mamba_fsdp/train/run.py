"""One run: what the loop works on, built from the settings; where it starts from; how it ends."""

import os
import time
from dataclasses import asdict
from itertools import chain

import torch

from config import resolve
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.folder import find_checkpoint, load
from mamba_fsdp.checkpoint.tensors import open_tensors
from mamba_fsdp.data.loader import Batch, Loader, evaluation_batches
from mamba_fsdp.data.order import Order
from mamba_fsdp.data.selection import training_sources, validation_stores
from mamba_fsdp.durable import write_atomically
from mamba_fsdp.errors import UserError
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import flops_per_token, parameter_count, parameters
from mamba_fsdp.ops import kernels, native
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.parallel.parallelize import fill, fill_parts, parallelize
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.report.progress import Progress as ProgressDisplay
from mamba_fsdp.report.records import Metrics
from mamba_fsdp.report.trackers import make_tracker
from mamba_fsdp.train import loop, memory
from mamba_fsdp.train.clock import Clock, device_peak, stragglers
from mamba_fsdp.train.optimizer import LossScale, make_optimizer
from mamba_fsdp.train.profile import Profiler
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.train.schedule import Schedule
from mamba_fsdp.train.stopping import StopRequest
from mamba_fsdp.train.watchdog import Watchdog

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run(settings, weights=None, publish=None):
    """Train as the settings say, from the newest checkpoint of the run folder or from the start. Returns the exit code,
    0.

    weights: what init_from named, an object with `get(name) -> tensor`. publish(checkpoint, folder) writes the finished
    model.
    """
    native.tune_process()
    if settings.training.deterministic:
        # Without it torch refuses every matrix product on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.training.deterministic)
    folder, progress = RunFolder(settings.checkpoint.save_ckpt_path), loop.Progress()
    world = start_world(timeout_minutes=settings.parallel.timeout_minutes)
    try:
        try:
            with Watchdog(settings.parallel.timeout_minutes, world.rank):
                world.on_rank0(folder.take)
                last = Run(settings, world, folder, progress, weights).train()
        finally:
            world.close()
        if last and world.rank == 0:
            finish(folder, last, publish)
    except BaseException as error:
        folder.say_failed(progress.step, error)
        raise
    finally:
        folder.give_back()
    return 0


def finish(folder, checkpoint, publish):
    """The whole model as one file, then the word `finished`: whoever reads that finds the model.

    Rank 0 does this when the ranks have parted: a large model may take longer than the others would wait.
    """
    step, published = int(checkpoint.name.removeprefix("step_")), folder.path / "pth" / checkpoint.name
    if publish and not published.exists():
        publish(checkpoint, published)
    folder.say("finished", step)
    print(f"finished   {step} steps; everything lies in {folder.path}", flush=True)


class Run:
    """Everything the loop needs, under the names it uses."""

    def __init__(self, settings, world, folder, progress, weights):
        self.settings, self.world, self.folder, self.progress = settings, world, folder, progress
        self.is_first = world.rank == 0
        self.checkpointer = Checkpointer(folder.path, world, keep=settings.checkpoint.keep_checkpoints,
                                         asynchronous=settings.checkpoint.async_checkpoint, report=self._say,
                                         check_ours=folder.check_ours)
        self._count_samples()
        self.open_data()
        with memory.explained(world.rank):
            self.build_model()
            self.start_from(weights)
        self._plan_steps()
        self.order_data()

    def _say(self, text):
        if self.is_first:
            print(text, flush=True)

    def _count_samples(self):
        """The samples of a step and of a rank in it."""
        training, world = self.settings.training, self.world
        per_pass = training.batch_size * world.size
        self.global_batch = training.global_batch_size or per_pass
        if self.global_batch % per_pass:
            raise UserError(f"global_batch_size {self.global_batch} is no multiple of batch_size {training.batch_size} "
                            f"times {world.size} ranks; set batch_size to a divisor of "
                            f"{self.global_batch / world.size:g}, or another global_batch_size")
        self.micro_batches = self.global_batch // per_pass
        self.tokens_per_step = self.global_batch * self.settings.data.seq_length

    def _plan_steps(self):
        """The steps that the settings' durations mean. Tokens seen count, also where a step had fewer or more."""
        training, progress, tokens_per_step = self.settings.training, self.progress, self.tokens_per_step
        self.total_steps = training.num_steps.steps(tokens_per_step)
        if progress.samples != progress.step * self.global_batch:
            before = progress.samples / progress.step
            self._say(f"batch      {self.global_batch} samples a step from here on, {before:g} before; "
                      "global_batch_size keeps it the same on any number of ranks")
            if training.num_steps.unit == "tok":
                left = max(0, training.num_steps.count - progress.tokens)
                self.total_steps = progress.step + -(-left // tokens_per_step)
        self.eval_steps = training.eval_interval.steps(tokens_per_step)
        self.checkpoint_steps = self.settings.checkpoint.checkpoint_interval.steps(tokens_per_step)
        schedule = self.settings.lr_schedule
        self.schedule = Schedule(schedule.schedule, self.total_steps,
                                 warmup=schedule.warmup_steps.steps(tokens_per_step),
                                 decay=schedule.decay_steps.steps(tokens_per_step),
                                 floor=schedule.min_learning_rate_ratio)

    def open_data(self):
        data = self.settings.data
        self.sources, self.weights = training_sources(data)
        self.validation = validation_stores(data)
        known = self.settings.model.vocab_size
        for store in [*self.sources.values(), *self.validation]:
            if store.vocab_size > known:
                raise UserError(f"{store.path} has a vocabulary of {store.vocab_size}, the model only {known}; "
                                f"set vocab_size={store.vocab_size}")

    def build_model(self):
        settings, world = self.settings, self.world
        training, parallel = settings.training, settings.parallel
        chosen = kernels.resolve(training.kernels, world.device.type)
        self.compute_dtype = DTYPES[training.mixed_precision]
        with torch.device("meta" if parallel.low_cpu_fsdp else "cpu"):
            model = MambaLM(settings.model, kernels=chosen, compute_dtype=self.compute_dtype,
                            reset_at_documents=settings.data.reset_at_documents)
        strategy = parallel.sharding_strategy
        if strategy == "auto":
            strategy = "fsdp" if world.size > 1 else "none"
        self.parallel = parallelize(
            model, world=world, strategy=strategy, compute_dtype=self.compute_dtype,
            activation_checkpointing=parallel.fsdp_activation_checkpointing,
            selective_checkpointing=settings.selective_share(), reentrant=parallel.reentrant_checkpointing,
            compile=parallel.use_torch_compile, backward_prefetch=parallel.backward_prefetch,
            limit_all_gathers=parallel.limit_all_gathers, low_cpu_fsdp=parallel.low_cpu_fsdp)
        self.optimizer = make_optimizer(self.parallel.parameters(), parameters(settings.model),
                                        settings.optimizer, fused=has_fused_adamw(world.device))
        self.flops_per_token = flops_per_token(settings.model, settings.data.seq_length)
        peak = device_peak(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        self.peak_flops = peak and peak * world.size
        self._say(f"model      {settings.model.model_name}: {parameter_count(settings.model):,} parameters, "
                  f"{settings.model.n_layer} layers, {training.mixed_precision}, {strategy} on {world.size} x "
                  f"{world.device.type}")
        self._say(f"kernels    {kernels.explain().removeprefix('kernels: ')}")

    def start_from(self, weights):
        """Fill the shards: from the newest checkpoint of the run folder, else from what the settings name, else at
        random."""
        checkpoint = self.settings.checkpoint
        newest = self.checkpointer.newest()
        if newest:
            saved = self._load(newest)
            vars(self.progress).update(vars(loop.Progress(**saved["progress"])))
            self._say(f"going on   from {newest}, step {self.progress.step}")
        elif checkpoint.load_ckpt_path.endswith(".pth"):
            self.world.run_local(lambda: self._read_pth(checkpoint.load_ckpt_path))
            self._say(f"starting   from the model in {checkpoint.load_ckpt_path}")
        elif checkpoint.load_ckpt_path:
            source = find_checkpoint(checkpoint.load_ckpt_path, self.world, report=self._say)
            saved = self._load(source)
            self.progress.optimizer_steps = saved["progress"]["optimizer_steps"]
            if checkpoint.resuming_dataset:
                self.progress.data = saved["progress"]["data"]
            position = "the data's position" if checkpoint.resuming_dataset else "the data from its start"
            self._say(f"starting   from model and optimiser in {source}, {position}")
        elif weights:
            self.world.run_local(lambda: fill(self.parallel.shards(), lambda name, shape: weights.get(name)))
            self._say(f"starting   from the weights in {checkpoint.init_from}")
        else:
            self.world.run_local(self._draw)
        self.loss_scale = LossScale(self.compute_dtype == torch.float16, self.progress.loss_scale,
                                    self.progress.loss_scale_good_steps)

    def _read_pth(self, path):
        tensors = open_tensors(path)
        tensors.check(self.parallel.shards())
        fill(self.parallel.shards(), tensors.get)

    def _draw(self):
        spec, seed = parameters(self.settings.model), self.settings.training.seed
        fill_parts(self.parallel.shards(),
                   lambda name, shape, start, stop: initial_part(name, spec[name], seed, start, stop))

    def _load(self, folder):
        shards = self.parallel.shards() + self.parallel.optimizer_shards(self.optimizer)
        saved = load(folder, shards, self.world, check=self._check_same_model)
        self.parallel.set_optimizer_steps(self.optimizer, saved["progress"]["optimizer_steps"])
        return saved

    def _check_same_model(self, saved, folder):
        now = resolve.as_dict(self.settings)["model"]
        differing = [f"{name} {then} (now {now[name]})" for name, then in saved["settings"]["model"].items()
                     if name not in resolve.SHAPELESS and name in now and now[name] != then]
        if differing:
            raise UserError(f"{folder} holds another model: {', '.join(differing)}; give these settings again, or "
                            "another save_ckpt_path")

    def order_data(self):
        """The loader, at the position from which the run goes on."""
        data, training, world = self.settings.data, self.settings.training, self.world
        order = Order(self.sources, self.weights, data.seq_length, training.seed, state=self.progress.data or None)
        self.loader = Loader(self.sources, order, rank=world.rank, world_size=world.size,
                             batch_size=training.batch_size, micro_batches=self.micro_batches,
                             vocab_size=self.settings.model.vocab_size, first_step=self.progress.step,
                             num_workers=data.num_workers, prefetch=data.prefetch,
                             reset_at_documents=data.reset_at_documents, pin_memory=world.device.type == "cuda")
        read = ", ".join(f"{store.path} ({len(store):,} tokens)" for store in self.sources.values())
        checked = ", ".join(str(store.path) for store in self.validation) or "none"
        self._say(f"data       {read}; validation: {checked}")
        self._say(f"steps      {self.total_steps:,} of {self.global_batch} x {data.seq_length} = "
                  f"{self.tokens_per_step:,} tokens")

    def train(self):
        """The loop with what surrounds it. Returns the last checkpoint of a run that is over, None of one that
        stopped."""
        if self.progress.step >= self.total_steps:
            self._say(f"over       {self.folder.path} has all its {self.progress.step} steps; raise num_steps to go on")
            return self.checkpointer.newest()
        first_step = self.progress.step
        with memory.explained(self.world.rank, while_=lambda: self.progress.step == first_step):
            reason = self._train()
        if not reason:
            return self.checkpointer.newest()
        if self.is_first:
            self.folder.say("stopped", self.progress.step, reason)
        self._say(f"stopped    at step {self.progress.step} ({reason}); the same command goes on from here")

    def _train(self):
        """The loop between its files and signals. Returns "" when the run is over, else why it stopped."""
        self.display = ProgressDisplay(self.total_steps, enabled=self.is_first)
        self.clock = Clock()
        self.metrics = self.tracker = None
        path, step, report = self.folder.path, self.progress.step, self.settings.report
        if self.is_first:
            write_atomically(path / "config.yaml", resolve.as_yaml(self.settings))
            self.folder.keep_tokenizer(next(iter(self.sources.values())).path)
            self.metrics = Metrics(path, step)
            self.tracker = make_tracker(report.tracker, path, resolve.as_dict(self.settings), step)
            self.folder.say("running", step)
        self.profiler = Profiler(path, self.world.rank, step) if report.use_profiler else None
        with self.loader, StopRequest(path, self.is_first) as self.stop:
            try:
                return loop.train(self)
            finally:
                self.display.close()
                if self.profiler:
                    self.profiler.close()
                if self.metrics:
                    self.metrics.close()
                    self.tracker.close()

    # What the loop calls.

    def next_batches(self):
        heart.beat()
        self.checkpointer.poll()
        return [batch.to(self.world.device) for batch in self.loader.step(self.progress.step)]

    def loss(self, batch):
        """The sum of the token losses of one micro-batch."""
        heart.beat()
        return self.parallel.module(batch.tokens, labels=batch.labels, documents=batch.documents)

    def set_learning_rate(self, step):
        rate = self.settings.optimizer.learning_rate * self.schedule.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def validates(self):
        return bool(self.validation) and self.eval_steps > 0

    def validation_batches(self):
        training, data = self.settings.training, self.settings.data
        limit = training.eval_batches * self.global_batch or None
        return self._watched(chain.from_iterable(
            evaluation_batches(store, str(store.path), seq_length=data.seq_length, batch_size=training.batch_size,
                               rank=self.world.rank, world_size=self.world.size,
                               vocab_size=self.settings.model.vocab_size, limit=limit,
                               reset_at_documents=data.reset_at_documents)
            for store in self.validation))

    def _watched(self, batches):
        for batch in batches:
            heart.beat()
            yield batch

    def show(self, loss, learning_rate, gradient_norm, report_due):
        """The live line; and when a report is due, its entry in the metrics."""
        progress = self.progress
        rate = self.tokens_per_step / self.clock.seconds_per_step(progress.step)
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        if report_due:
            loss = progress.loss_sum / progress.loss_steps if progress.loss_steps else float("nan")
            progress.loss_sum, progress.loss_steps = 0.0, 0
            entry = {"step": progress.step, "tokens": progress.tokens, "loss": loss, "learning_rate": learning_rate,
                     "grad_norm": gradient_norm, "skipped_steps": progress.skipped_steps,
                     "tokens_per_second": round(rate, 1)}
            entry.update({"mfu": round(mfu, 4)} if mfu else {})
            busy = self.world.gather_objects(self.clock.busy_seconds_per_step(progress.step))
            entry.update(stragglers(busy) if self.world.size > 1 else {})
            self.record(entry)
        self.display.step(progress.step, loss=loss, learning_rate=learning_rate, tokens_per_second=rate, mfu=mfu,
                          seconds_left=self.clock.seconds_left(progress.step, self.total_steps), report=report_due)
        if report_due:
            self.clock.next_interval(progress.step)
        if self.profiler:
            self.profiler.step(progress.step)

    def record(self, entry):
        if self.metrics:
            self.folder.check_ours()
            self.metrics.write(entry)
            self.tracker.write(entry)

    def progress_line(self, text):
        self.display.line(text)

    def save(self, wait):
        """Commit a checkpoint of everything after the current step."""
        began = time.perf_counter()
        progress = self.progress
        if self.metrics:
            self.metrics.sync()  # what precedes a committed checkpoint must not be lost
        saved = asdict(progress)
        saved["data"] = self.loader.state_before(progress.step)
        if self.loss_scale.dynamic:
            saved["loss_scale"], saved["loss_scale_good_steps"] = self.loss_scale.value, self.loss_scale.good_steps
        state = {"progress": saved, "settings": resolve.as_dict(self.settings), "world_size": self.world.size,
                 "torch": torch.__version__}
        shards = self.parallel.shards() + self.parallel.optimizer_shards(self.optimizer)
        self.checkpointer.save(progress.step, shards, state)
        if wait:
            self.checkpointer.wait()
        self.clock.skip(time.perf_counter() - began)

    def describe_bad_samples(self, batches):
        """Which samples of the step have a loss that is not finite, found one by one."""
        bad = []
        with torch.no_grad():
            for batch in batches:
                for row, (source, window) in enumerate(batch.samples):
                    tensors = (None if tensor is None else tensor[row:row + 1] for tensor in batch[:3])
                    if not torch.isfinite(self.loss(Batch(*tensors, [(source, window)]))):
                        bad.append(f"{source} window {window}")
        bad = list(chain.from_iterable(self.world.gather_objects(bad)))
        drawn = list(chain.from_iterable(self.world.gather_objects([f"{source} window {window}" for batch in batches
                                                                    for source, window in batch.samples])))
        said = (f"loss not finite for {', '.join(bad[:8])}" if bad
                else f"only gradients overflow; samples {', '.join(drawn[:8])}")
        return (f"{self.progress.skipped_in_a_row} steps in a row were not finite, the last is step "
                f"{self.progress.step}: {said}. Lower learning_rate, use mixed_precision=bf16, or look at these "
                "samples")
