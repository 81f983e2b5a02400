//! The rules behind [`super::choose`]: which options are ruled out, impossible or unsuited.

use super::baseline::{Ask, Have, Keep, Placed, Refused, place};
use super::{
    Backend, Choice, ChooseError, Codec, Considered, Encoder, Engine, Facts, Link, Offload, Overrides,
    Placement, Strategy, Subject,
};

/// Why an option is not taken.
struct Objection {
    why: String,
    blocked: bool,
}

#[expect(clippy::unnecessary_wraps, reason = "every caller answers with an option")]
fn unsuited(why: impl Into<String>) -> Option<Objection> {
    Some(Objection { why: why.into(), blocked: false })
}

#[expect(clippy::unnecessary_wraps, reason = "every caller answers with an option")]
fn blocked(why: impl Into<String>) -> Option<Objection> {
    Some(Objection { why: why.into(), blocked: true })
}

/// The facts and demands together, with their direct consequences.
struct Case<'a> {
    facts: &'a Facts,
    demands: &'a Overrides,
    backend: Backend,
}

/// Asks the questions in order. The facts' numbers have been checked.
pub(super) fn decide(facts: &Facts, overrides: &Overrides) -> Result<Choice, ChooseError> {
    let backend = overrides.weight_sync_backend.unwrap_or(facts.backend);
    let case = Case { facts, demands: overrides, backend };
    if case.wants_gpu() && case.wants_host() {
        return Err(ChooseError::Contradiction { by: case.demanded() });
    }
    let mut considered = Vec::new();
    let strategy = case.pick_strategy(&mut considered)?;
    let link = case.pick_link(strategy)?;
    let (codec, codec_why) = case.pick_codec(strategy, link, &mut considered)?;
    let (encoder, offload, encoder_why) = case.pick_encoder(strategy, codec, &mut considered)?;
    let why = [case.praise(strategy, link), codec_why, encoder_why].concat();
    Ok(Choice { strategy, link, codec, encoder, offload, why, considered })
}

impl Case<'_> {
    fn wants_gpu(&self) -> bool {
        self.demands.encoder == Some(Encoder::Gpu) || self.demands.offload_mode == Some(Offload::Delta)
    }

    fn wants_host(&self) -> bool {
        self.demands.encoder == Some(Encoder::Host) || self.demands.offload_mode == Some(Offload::Copy)
    }

    fn pick_strategy(&self, considered: &mut Vec<Considered>) -> Result<Strategy, ChooseError> {
        let open: Vec<Strategy> =
            Strategy::ALL.iter().copied().filter(|s| self.ruled_out(*s).is_none()).collect();
        let Some(&first) = open.first() else {
            return Err(ChooseError::Contradiction { by: self.demanded() });
        };
        let possible: Vec<Strategy> =
            open.iter().copied().filter(|s| self.impossible(*s).is_none()).collect();
        let best = possible.iter().find(|s| self.unsuited(**s).is_none()).or(possible.first());
        let Some(&chosen) = best else {
            let reasons = open.iter().filter_map(|s| Some(format!("{s}: {}", self.impossible(*s)?.why)));
            let why = reasons.collect::<Vec<_>>().join("; ");
            let option = match (self.demands.strategy, self.demands.link) {
                (None, Some(link)) => Subject::Link(link),
                (Some(_), _) | (None, None) => Subject::Strategy(first),
            };
            return Err(ChooseError::Impossible { option, by: self.demanded(), why });
        };
        for &other in Strategy::ALL.iter().filter(|s| **s != chosen) {
            let not_needed = || Objection { why: format!("{chosen} comes first"), blocked: false };
            let objection = self
                .ruled_out(other)
                .or_else(|| self.impossible(other))
                .or_else(|| self.unsuited(other))
                .unwrap_or_else(not_needed);
            // A blocked option counts as a fallback only if it comes before the chosen one.
            let blocked = objection.blocked && other < chosen;
            let faster = Subject::Strategy(other);
            self.note(considered, faster, Subject::Strategy(chosen), Objection { blocked, ..objection })?;
        }
        Ok(chosen)
    }

    /// Records why an option was not taken; in strict mode, a blocked one is an error.
    fn note(
        &self,
        considered: &mut Vec<Considered>,
        option: Subject,
        chosen: Subject,
        objection: Objection,
    ) -> Result<(), ChooseError> {
        if self.demands.strict && objection.blocked {
            return Err(ChooseError::Fallback { faster: option, chosen, blocked_by: objection.why });
        }
        considered.push(Considered { option, why_not: objection.why, blocked: objection.blocked });
        Ok(())
    }

    /// The overrides in force, for messages.
    fn demanded(&self) -> String {
        let d = self.demands;
        let mut all = Vec::new();
        all.extend(d.strategy.map(|v| format!("strategy = {v}")));
        all.extend(d.link.map(|v| format!("link = {v}")));
        all.extend(d.codec.map(|v| format!("codec = {v}")));
        all.extend(d.use_cuda_ipc.map(|v| format!("use_cuda_ipc = {v}")));
        all.extend(d.pack_weights.map(|v| format!("pack_weights = {v}")));
        all.extend(d.weight_sync_backend.map(|v| format!("weight_sync_backend = {}", v.as_str())));
        all.extend(d.encoder.map(|v| format!("encoder = {v}")));
        all.extend(d.offload_mode.map(|v| format!("offload_mode = {v}")));
        all.join(", ")
    }

    fn ruled_out(&self, s: Strategy) -> Option<Objection> {
        let d = self.demands;
        if let Some(v) = d.strategy
            && v != s
        {
            return unsuited(format!("strategy = {v} is configured"));
        }
        // The other overrides are about syncing a whole model; an adapter must not turn into one.
        if self.facts.lora && d.strategy.is_none() {
            let lora = s == Strategy::Lora;
            let why = "only the adapter changes, and this would send the base weights again";
            return if lora { None } else { unsuited(why) };
        }
        if let Some(v) = d.link
            && !s.links().contains(&v)
        {
            return unsuited(format!("link = {v} is configured"));
        }
        if let Some(v) = d.codec
            && v != Codec::Full
            && !s.carries_deltas()
        {
            return unsuited(format!("codec = {v} is configured, and {s} carries whole tensors"));
        }
        if let Some(v) = d.encoder
            && !s.carries_deltas()
        {
            return unsuited(format!("encoder = {v} is configured, and {s} carries whole tensors"));
        }
        if let Some(v) = d.offload_mode
            && !s.publishes()
        {
            return unsuited(format!("offload_mode = {v} is configured, and {s} publishes no image"));
        }
        if let Some(v) = d.use_cuda_ipc
            && v != s.is_ipc()
        {
            return unsuited(format!("use_cuda_ipc = {v} is configured"));
        }
        match (d.pack_weights, s) {
            (Some(true), s) if s != Strategy::PackedCudaIpc => {
                unsuited("pack_weights = true is configured, and only packed_cuda_ipc packs")
            }
            (Some(false), Strategy::PackedCudaIpc) => unsuited("pack_weights = false is configured"),
            _ => None,
        }
    }

    fn impossible(&self, s: Strategy) -> Option<Objection> {
        let f = self.facts;
        match s {
            Strategy::PackedCudaIpc | Strategy::CudaIpc => self.ipc_impossible(s),
            Strategy::Broadcast => self.broadcast_impossible(),
            Strategy::Lora if !f.lora => unsuited("no adapter is trained; the whole model has to be synced"),
            Strategy::Store if f.store_url.is_none() => {
                let why = "no store_url is given, where both sides would reach a store";
                Some(Objection { why: why.into(), blocked: f.cross_region })
            }
            Strategy::Nixl if !f.nixl_library => {
                let why = "NIXL is not known to be on both sides: install nixl-cu12 there; `windlass doctor` tests it";
                // Only an RDMA device that lies idle is a loss.
                Some(Objection { why: why.into(), blocked: self.unsuited(s).is_none() })
            }
            Strategy::Lora | Strategy::Store | Strategy::Nixl | Strategy::Tcp => None,
        }
    }

    fn ipc_impossible(&self, s: Strategy) -> Option<Objection> {
        let f = self.facts;
        match f.placement {
            Placement::Remote => {
                return unsuited(
                    "the engines run on another host, and IPC handles open only on their own GPU",
                );
            }
            Placement::SameHost => {
                let reach = match f.peer_access {
                    Some(true) => {
                        ", and handles open only on their own GPU, also where others could reach it"
                    }
                    Some(false) => ", which they cannot reach (no peer access)",
                    None => "",
                };
                let shared = f.engine_gpus.iter().filter(|u| f.trainer_gpus.contains(u)).count();
                let who = match shared {
                    0 => "the engines do not share the trainers' GPUs".to_owned(),
                    n => format!("only {n} of the engines' {} GPUs are the trainers'", f.engine_gpus.len()),
                };
                return unsuited(format!("{who}{reach}; colocate them to use IPC"));
            }
            Placement::SameGpu => {}
        }
        // The run is colocated, so any obstacle from here on is a loss.
        for (side, cuda) in [("trainers", &f.trainer_cuda), ("engines", &f.engine_cuda)] {
            if let Some(why) = cuda.objection() {
                return blocked(format!("CUDA cannot be used at the {side}: {why}"));
            }
        }
        if f.trainer_gpus.is_empty() || f.engine_gpus.is_empty() {
            let side = if f.trainer_gpus.is_empty() { "trainers" } else { "engines" };
            return blocked(format!("no GPU was found at the {side}; check that CUDA is visible there"));
        }
        if let Some(uuid) = f.engine_gpus.iter().find(|u| !f.trainer_gpus.contains(u)) {
            return blocked(format!(
                "no trainer rank holds the engine's GPU {uuid}, so nobody can export a handle for it; \
                 check CUDA_VISIBLE_DEVICES and the placement group"
            ));
        }
        if f.engines.contains(&Engine::Http) {
            return blocked(
                "an engine is reached by HTTP only and cannot open IPC handles; install the worker extension",
            );
        }
        if let Some(namespace) = f.trainer_cuda.namespace_apart(&f.engine_cuda) {
            return blocked(format!(
                "handles do not open in a container that does not share the trainers' {namespace}"
            ));
        }
        self.export_impossible(s)
    }

    /// Why the trainers cannot give their memory to others.
    fn export_impossible(&self, s: Strategy) -> Option<Objection> {
        let (f, cuda) = (self.facts, &self.facts.trainer_cuda);
        if cuda.exports_handles == Some(false) {
            return blocked(
                "the driver exports no memory of the trainers' GPUs (a virtual machine or WSL); `windlass doctor` shows \
                 what it said",
            );
        }
        // Memory that torch's allocator does not share is gathered into an arena, as if it were packed.
        if s == Strategy::CudaIpc && !self.segments_are_gathered() {
            return None;
        }
        match (f.arena_bytes, cuda.free_bytes) {
            (Some(needs), Some(free)) if free < needs => blocked(format!(
                "the arena needs {} of GPU memory, and {} are free at the trainers; make the buckets smaller \
                 (weight_transfer_threshold_cuda_ipc_GB)",
                size(needs),
                size(free)
            )),
            _ => None,
        }
    }

    /// Whether parameters cannot be lent where they are.
    fn segments_are_gathered(&self) -> bool {
        let cuda = &self.facts.trainer_cuda;
        cuda.expandable_segments == Some(true) && cuda.exports_descriptors == Some(false)
    }

    fn broadcast_impossible(&self) -> Option<Objection> {
        let f = self.facts;
        if f.elastic {
            return unsuited("engines may join and leave, and a collective group cannot change its members");
        }
        match self.backend {
            Backend::Nccl if f.trainer_gpus.is_empty() || f.engine_gpus.is_empty() => {
                unsuited("nccl needs a GPU on both sides; set weight_sync_backend to gloo")
            }
            Backend::Nccl if f.engine_gpus.iter().any(|u| f.trainer_gpus.contains(u)) => unsuited(
                "nccl refuses two ranks on one GPU, and trainers and engines share one; use IPC or gloo",
            ),
            Backend::Nccl | Backend::Gloo => None,
        }
    }

    fn unsuited(&self, s: Strategy) -> Option<Objection> {
        let f = self.facts;
        match s {
            Strategy::PackedCudaIpc | Strategy::CudaIpc if self.backend == Backend::Gloo => {
                match self.demands.weight_sync_backend {
                    Some(_) => unsuited("weight_sync_backend = gloo is configured"),
                    None => blocked("the backend is gloo; set weight_sync_backend to nccl to use IPC"),
                }
            }
            // This side cannot see how the server was started, and its adapter refuses one without the loader.
            Strategy::PackedCudaIpc | Strategy::CudaIpc if f.engines.contains(&Engine::Sglang) => blocked(
                "SGLang opens handles only if it was started with --custom-weight-loader windlass.sglang.custom.load; \
                 set use_cuda_ipc = true if it was",
            ),
            Strategy::CudaIpc
                if self.demands.pack_weights != Some(false)
                    && self.impossible(Strategy::PackedCudaIpc).is_none() =>
            {
                unsuited("packed buckets open one handle per run instead of one per parameter")
            }
            Strategy::Store if !f.cross_region => {
                unsuited("the engines are in the same region and can be reached directly, which is faster")
            }
            Strategy::Broadcast if f.cross_region => {
                unsuited("across regions a collective runs at the pace of the slowest link, for every rank")
            }
            Strategy::Nixl if f.placement != Placement::Remote => {
                unsuited("on one host shared memory needs no copy at all")
            }
            Strategy::Nixl if !f.rdma_device || f.cross_region => {
                unsuited("there is no RDMA between the hosts, and without it NIXL is TCP with more parts")
            }
            Strategy::Lora
            | Strategy::PackedCudaIpc
            | Strategy::CudaIpc
            | Strategy::Store
            | Strategy::Broadcast
            | Strategy::Nixl
            | Strategy::Tcp => None,
        }
    }

    fn pick_link(&self, s: Strategy) -> Result<Link, ChooseError> {
        let f = self.facts;
        // Engines need the shares of all trainers.
        let local = f.placement != Placement::Remote && !f.several_hosts;
        let near = if local { Link::Shm } else { Link::Tcp };
        let fitting = match s {
            Strategy::Lora if f.lora_sync_path.is_some() => Link::File,
            Strategy::Lora | Strategy::Tcp => near,
            Strategy::PackedCudaIpc | Strategy::CudaIpc => Link::CudaIpc,
            Strategy::Store if self.store_is_path() => Link::File,
            Strategy::Store => Link::Store,
            Strategy::Broadcast => Link::Collective,
            Strategy::Nixl => Link::Nixl,
        };
        let Some(link) = self.demands.link else { return Ok(fitting) };
        let why = match (s, link) {
            (Strategy::Lora, link) if !s.links().contains(&link) => "adapters travel by file, shm or tcp",
            (_, Link::Shm) if !local => {
                "the engines run on another host and share no memory with the trainers"
            }
            (Strategy::Lora, Link::File) if f.lora_sync_path.is_none() => {
                "no lora_sync_path is given; set it to a directory that both sides see"
            }
            (Strategy::Store, Link::File) if !self.store_is_path() => {
                "store_url is an object store, not a path; use link = store"
            }
            (Strategy::Store, Link::Store) if self.store_is_path() => {
                "store_url is a path, not an object store; use link = file"
            }
            _ => return Ok(link),
        };
        Err(ChooseError::Impossible { option: Subject::Link(link), by: self.demanded(), why: why.to_owned() })
    }

    fn store_is_path(&self) -> bool {
        let path = |url: &String| url.starts_with("file:") || !url.contains("://");
        self.facts.store_url.as_ref().is_some_and(path)
    }

    /// Why the other side cannot decode a delta.
    fn delta_impossible(&self, codec: Codec) -> Option<String> {
        let f = self.facts;
        if !f.peer.delta {
            return Some("the engine side does not decode deltas; update windlass there".into());
        }
        if let Some(theirs) = f.peer.codec_version
            && theirs != f.codec_version
        {
            return Some(format!(
                "the engine side speaks codec version {theirs}, we speak {}; update the older one",
                f.codec_version
            ));
        }
        if codec == Codec::DeltaContext && !f.peer.context {
            return Some("the engine side did not register for context mode; enable it there".into());
        }
        None
    }

    fn pick_codec(
        &self,
        s: Strategy,
        link: Link,
        considered: &mut Vec<Considered>,
    ) -> Result<(Codec, String), ChooseError> {
        if let Some(codec) = self.demands.codec {
            let objection = match codec {
                Codec::Full => None,
                // Other strategies without deltas were ruled out before.
                Codec::DeltaPlain | Codec::DeltaContext if !s.carries_deltas() => {
                    Some("an adapter is small and travels whole".to_owned())
                }
                Codec::DeltaPlain | Codec::DeltaContext => self.delta_impossible(codec),
            };
            if let Some(why) = objection {
                let by = self.demanded();
                return Err(ChooseError::Impossible { option: Subject::Codec(codec), by, why });
            }
            return Ok((codec, format!("; codec {codec} is configured")));
        }
        if !s.carries_deltas() {
            return Ok((Codec::Full, "; it carries whole tensors".into()));
        }
        let rate = self.facts.change_rate.unwrap_or(USUAL_CHANGE_RATE);
        let percent = rate * 100.0;
        let (delta, full) = (Subject::Codec(Codec::DeltaPlain), Subject::Codec(Codec::Full));
        if rate >= DENSE_CHANGE_RATE {
            let why = format!("{percent:.0} % of the elements change, so a delta would not be smaller");
            self.note(considered, delta, full, Objection { why, blocked: false })?;
            return Ok((Codec::Full, format!("; whole tensors, as {percent:.0} % of them change")));
        }
        if let Some(why) = self.delta_impossible(Codec::DeltaPlain) {
            self.note(considered, delta, full, Objection { why, blocked: true })?;
            return Ok((Codec::Full, "; whole tensors, as deltas cannot be decoded".into()));
        }
        let context = Subject::Codec(Codec::DeltaContext);
        let objection = if !self.context_pays(link, rate) {
            let why = "another pass over the old weights would take longer than the bits it saves".into();
            Objection { why, blocked: false }
        } else if self.wants_gpu() {
            Objection { why: PLAIN_ONLY.into(), blocked: false }
        } else if let Some(why) = self.delta_impossible(Codec::DeltaContext) {
            Objection { why, blocked: true }
        } else {
            let why = "; deltas in context mode, as the link is slower than a pass over the old weights";
            return Ok((Codec::DeltaContext, why.into()));
        };
        self.note(considered, context, delta, objection)?;
        let image = self.facts.model_bytes.map_or(String::new(), |b| {
            format!(" (about {:.0} MB of {:.0} MB)", delta_bytes(b, rate) / 1e6, b as f64 / 1e6)
        });
        Ok((Codec::DeltaPlain, format!("; deltas, as about {percent:.2} % changes per step{image}")))
    }

    fn context_pays(&self, link: Link, rate: f64) -> bool {
        let wire = link != Link::Shm && link != Link::File;
        let saved_per_image_byte = rate * CONTEXT_SAVES_BITS / 16.0;
        let speed = self.facts.link_bytes_per_second;
        wire && speed.is_some_and(|v| saved_per_image_byte * PASS_BYTES_PER_SECOND > v as f64)
    }

    fn pick_encoder(
        &self,
        s: Strategy,
        codec: Codec,
        considered: &mut Vec<Considered>,
    ) -> Result<(Option<Encoder>, Option<Offload>, String), ChooseError> {
        let d = self.demands;
        let impossible =
            |option, why: String| Err(ChooseError::Impossible { option, by: self.demanded(), why });
        if codec == Codec::Full
            && let Some(encoder) = d.encoder
        {
            return impossible(
                Subject::Encoder(encoder),
                "whole tensors are sent, so nothing is encoded".into(),
            );
        }
        if !s.publishes() {
            // Others were ruled out before.
            return match d.offload_mode {
                Some(mode) => impossible(Subject::Offload(mode), "an adapter is small and goes whole".into()),
                None => Ok((None, None, String::new())),
            };
        }
        let encoded = codec != Codec::Full;
        let objection = self.gpu_objection(codec);
        if self.wants_gpu() {
            let option = d.encoder.map_or(Subject::Offload(Offload::Delta), Subject::Encoder);
            return match objection {
                Some(objection) => impossible(option, objection.why),
                None => Ok((encoded.then_some(Encoder::Gpu), Some(Offload::Delta), self.gpu_praise())),
            };
        }
        let copied = |why: String| (encoded.then_some(Encoder::Host), Some(Offload::Copy), why);
        if self.wants_host() || !encoded {
            return Ok(copied(String::new()));
        }
        let Some(objection) = objection else {
            return Ok((Some(Encoder::Gpu), Some(Offload::Delta), self.gpu_praise()));
        };
        let why = format!(", found on the host: {}", objection.why);
        self.note(considered, Subject::Encoder(Encoder::Gpu), Subject::Encoder(Encoder::Host), objection)?;
        Ok(copied(why))
    }

    /// Why the GPU does not find the changes.
    fn gpu_objection(&self, codec: Codec) -> Option<Objection> {
        let f = self.facts;
        // The reason why CUDA is unusable is more helpful than the fact that it is.
        if let Some(why) = f.trainer_cuda.objection() {
            return blocked(format!(
                "CUDA cannot be used at the trainers: {why}; encoder = host does without"
            ));
        }
        if f.trainer_gpus.is_empty() {
            return unsuited("no GPU was found at the trainers");
        }
        if codec == Codec::DeltaContext {
            return unsuited(PLAIN_ONLY);
        }
        match self.baseline() {
            Some(Err(refused)) => blocked(refused.to_string()),
            Some(Ok(placed)) if !placed.is_cheaper() && !self.wants_gpu() => unsuited(format!(
                "{} that the GPU would compare with would be on the host, for want of GPU memory: that takes about {} and a \
                 copy {}; offload_mode = delta takes it",
                size(placed.host),
                milliseconds(placed.compare_seconds()),
                milliseconds(placed.copy_seconds())
            )),
            Some(Ok(_)) => None,
            None if self.is_shared() && !self.wants_gpu() => unsuited(
                "the engines share the trainers' GPUs and need the memory that a baseline would take; say baseline_bytes \
                 and trainer_cuda.free_bytes, or offload_mode = delta",
            ),
            None if f.gpu_baseline_fits => None,
            None => unsuited(
                "the trainers' GPUs have no room for a baseline, as far as is known; say baseline_bytes and \
                 trainer_cuda.free_bytes",
            ),
        }
    }

    /// Whether an engine uses a trainer's GPU.
    fn is_shared(&self) -> bool {
        let f = self.facts;
        f.placement == Placement::SameGpu || f.engine_gpus.iter().any(|u| f.trainer_gpus.contains(u))
    }

    /// Where a baseline would be placed. Host memory is unknown here; the rank that allocates asks for it.
    fn baseline(&self) -> Option<Result<Placed, Refused>> {
        let ask = Ask {
            weights: self.facts.baseline_bytes?,
            records: None,
            keep: Keep::Auto,
            is_demanded: self.wants_gpu(),
        };
        Some(place(&ask, &Have { free: self.facts.trainer_cuda.free_bytes?, total: None, host: None }))
    }

    fn gpu_praise(&self) -> String {
        let room = match (self.baseline(), self.facts.trainer_cuda.free_bytes) {
            (Some(Ok(Placed { device, host: 0, records })), Some(free)) => {
                format!(" (a baseline of {} in {} of free GPU memory)", size(device + records), size(free))
            }
            (Some(Ok(placed)), Some(free)) => format!(
                " (a baseline of {} in {} of free GPU memory and {} on the host: comparing takes about {}, a copy {})",
                size(placed.device + placed.records),
                size(free),
                size(placed.host),
                milliseconds(placed.compare_seconds()),
                milliseconds(placed.copy_seconds())
            ),
            _ => String::new(),
        };
        format!(", found on the GPU so that only they cross the bus{room}")
    }

    /// The GPUs that both sides have.
    fn shared_gpus(&self) -> String {
        match &*self.facts.engine_gpus {
            [] => String::new(),
            [one] => format!(" ({one})"),
            [first, rest @ ..] => format!(" ({first} and {} more)", rest.len()),
        }
    }

    /// The reason for a strategy.
    fn praise(&self, s: Strategy, link: Link) -> String {
        let reason = match (s, link) {
            (Strategy::Lora, Link::File) => "only an adapter is trained, and both sides see its directory",
            (Strategy::Lora, _) => "only an adapter is trained, and it travels as an image of its own",
            (Strategy::PackedCudaIpc | Strategy::CudaIpc, _) => return self.with_demands(self.ipc_praise(s)),
            (Strategy::Store, _) => "a store is given: each region reads at its own pace",
            (Strategy::Broadcast, _) => match self.backend {
                Backend::Nccl => "the set of engines is fixed: one nccl group for the run",
                Backend::Gloo => "the set of engines is fixed: one gloo group for the run",
            },
            (Strategy::Nixl, _) => "engines pull by RDMA when they like, and may come and go",
            (Strategy::Tcp, Link::Shm) => {
                "engines on this host map the trainer's memory, and may come and go"
            }
            (Strategy::Tcp, _) => "engines pull over TCP when they like, and may come and go",
        };
        self.with_demands(reason.to_owned())
    }

    fn ipc_praise(&self, s: Strategy) -> String {
        let expandable = self.facts.trainer_cuda.expandable_segments == Some(true);
        let how = match (s == Strategy::PackedCudaIpc, expandable) {
            (true, true) => "one arena, one handle (expandable segments of torch do not matter to it)",
            (true, false) => "one arena, one handle",
            (false, true) if self.segments_are_gathered() => {
                "parameters are gathered into an arena, as torch's expandable segments are not shared (set \
                 TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1, or pack_weights)"
            }
            (false, true) => {
                "parameters are read where they are, by descriptors, as torch's segments are expandable"
            }
            (false, false) => "one handle per parameter",
        };
        format!("the engines share the trainers' GPUs{}: {how}", self.shared_gpus())
    }

    fn with_demands(&self, reason: String) -> String {
        match self.demanded() {
            demanded if demanded.is_empty() => reason,
            demanded => format!("{reason} (configured: {demanded})"),
        }
    }
}

/// Formats a number of bytes.
fn size(bytes: u64) -> String {
    if bytes < 10_000_000_000 {
        format!("{:.0} MB", bytes as f64 / 1e6)
    } else {
        format!("{:.1} GB", bytes as f64 / 1e9)
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.0} ms", seconds * 1e3)
}

/// The encoder's output on a GPU.
const PLAIN_ONLY: &str = "a GPU makes plain records; those of context mode are made on the host";

/// Share of elements that usually changes per step, if the facts do not give it.
const USUAL_CHANGE_RATE: f64 = 0.01;
/// From here on a delta is no smaller than the image.
const DENSE_CHANGE_RATE: f64 = 0.5;
/// Bits per change of plain mode, on 16-bit elements.
const PLAIN_BITS: f64 = 11.0;
/// Bits per change that context mode saves.
const CONTEXT_SAVES_BITS: f64 = 3.0;
/// Speed of the receiver's extra pass over the old weights: a cautious figure for two cores.
const PASS_BYTES_PER_SECOND: f64 = 6e9;

/// Expected size of a plain delta of 16-bit elements.
fn delta_bytes(image: u64, rate: f64) -> f64 {
    image as f64 * rate * PLAIN_BITS / 16.0
}
