//! What would be chosen for trainers on this machine, and why.
//!
//! Owns: the placements that are asked about, and how the answers are shown. The decision is
//! [`windlass_core::choose`], of the facts that the driver gave; what cannot be known here, such as how fast the network is, is
//! left out of them.

use std::fmt::Write as _;

use serde_json::{Value, json};
use windlass_core::choose::{Backend, Choice, Cuda, Facts, Overrides, Peer, Placement, choose};

/// The arena of packed IPC with the default bucket size.
const ARENA: u64 = 2 << 30;

/// Engines at one place, and what follows.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Where, as a phrase.
    engines: &'static str,
    choice: Result<Choice, String>,
}

/// What would be chosen for trainers with these GPUs, and a model of so many bytes if that is known. `nixl` says whether this host
/// has its library and an RDMA device; engines on other hosts are taken to have the same.
pub(crate) fn choices(
    gpus: &[String],
    cuda: &Cuda,
    model_bytes: Option<u64>,
    nixl: (bool, bool),
) -> Vec<Asked> {
    let has_gpus = !gpus.is_empty() && cuda.objection().is_none();
    let facts = |placement, engine_gpus: &[String], elastic| Facts {
        placement,
        elastic,
        backend: if has_gpus { Backend::Nccl } else { Backend::Gloo },
        trainer_gpus: gpus.to_vec(),
        engine_gpus: engine_gpus.to_vec(),
        trainer_cuda: cuda.clone(),
        engine_cuda: cuda.clone(),
        // Engines of the same version of Windlass.
        peer: Peer { delta: true, ..Peer::default() },
        model_bytes,
        baseline_bytes: model_bytes.map(|bytes| bytes / gpus.len().max(1) as u64),
        arena_bytes: Some(ARENA),
        nixl_library: nixl.0,
        rdma_device: nixl.1,
        ..Facts::default()
    };
    // GPUs that are not the trainers'.
    let theirs = if has_gpus { vec!["of an engine".to_owned()] } else { Vec::new() };
    let colocated = has_gpus.then(|| ("on these GPUs", facts(Placement::SameGpu, gpus, false)));
    let others = [
        ("on this host, coming and going", facts(Placement::SameHost, &theirs, true)),
        ("on other hosts, coming and going", facts(Placement::Remote, &theirs, true)),
        ("on other hosts, a fixed set", facts(Placement::Remote, &theirs, false)),
    ];
    let asked = colocated.into_iter().chain(others);
    asked
        .map(|(engines, facts)| {
            let choice = choose(&facts, &Overrides::default()).map_err(|e| e.to_string());
            Asked { engines, choice }
        })
        .collect()
}

impl Asked {
    /// For machines.
    pub(crate) fn json(&self) -> Value {
        match &self.choice {
            Ok(choice) => json!({ "engines": self.engines, "choice": choice }),
            Err(error) => json!({ "engines": self.engines, "error": error }),
        }
    }

    /// For people: the choice, its reason, and what would have been taken if something were not missing.
    pub(crate) fn write(&self, out: &mut String) {
        let choice = match &self.choice {
            Ok(choice) => choice,
            Err(error) => {
                let _ = writeln!(out, "  {}: {error}", self.engines);
                return;
            }
        };
        let offload = choice.offload.map_or(String::new(), |o| format!(", offload by {o}"));
        let Choice { strategy, link, codec, why, considered, .. } = choice;
        let _ = writeln!(out, "  {}: {strategy} over {link}, {codec}{offload}", self.engines);
        let _ = writeln!(out, "    {why}");
        for c in considered.iter().filter(|c| c.blocked && !why.contains(&c.why_not)) {
            let _ = writeln!(out, "    not {}: {}", c.option, c.why_not);
        }
    }
}

#[cfg(test)]
mod tests {
    use windlass_core::choose::{Codec, Link, Offload, Strategy};

    use super::*;

    fn of<'a>(all: &'a [Asked], engines: &str) -> &'a Choice {
        all.iter().find(|a| a.engines == engines).unwrap().choice.as_ref().unwrap()
    }

    #[test]
    fn without_a_gpu_engines_are_asked_about_where_they_can_be() {
        let all = choices(
            &[],
            &Cuda { unusable: Some("no driver".into()), ..Cuda::default() },
            None,
            (false, false),
        );
        assert_eq!(all.len(), 3);
        let near = of(&all, "on this host, coming and going");
        assert_eq!((near.strategy, near.link, near.codec), (Strategy::Tcp, Link::Shm, Codec::DeltaPlain));
        let fixed = of(&all, "on other hosts, a fixed set");
        assert_eq!(fixed.strategy, Strategy::Broadcast);
    }

    #[test]
    fn with_gpus_the_choice_follows_from_the_driver_and_the_size() {
        let gpus = ["GPU-1".to_owned()];
        let cuda = Cuda {
            driver: Some((13, 0)),
            capability: Some((9, 0)),
            free_bytes: Some(100 << 30),
            exports_handles: Some(true),
            ..Cuda::default()
        };
        let all = choices(&gpus, &cuda, Some(16 << 30), (false, false));
        assert_eq!(of(&all, "on these GPUs").strategy, Strategy::PackedCudaIpc);
        let away = of(&all, "on other hosts, coming and going");
        assert_eq!((away.strategy, away.offload), (Strategy::Tcp, Some(Offload::Delta)));
        // Of a larger one a part is on the host, and of one that is much larger too much of it.
        let split = choices(&gpus, &cuda, Some(160 << 30), (true, false));
        let away = of(&split, "on other hosts, coming and going");
        assert_eq!(away.offload, Some(Offload::Delta));
        assert!(away.why.contains("128.8 GB on the host"), "{}", away.why);
        let large = choices(&gpus, &cuda, Some(1000 << 30), (false, false));
        assert_eq!(of(&large, "on other hosts, coming and going").offload, Some(Offload::Copy));
        let rdma = choices(&gpus, &cuda, Some(16 << 30), (true, true));
        assert_eq!(of(&rdma, "on other hosts, coming and going").link, Link::Nixl);
        let bare = choices(&gpus, &cuda, Some(16 << 30), (false, true));
        let mut text = String::new();
        bare.iter().for_each(|a| a.write(&mut text));
        assert!(text.contains("not strategy nixl") && text.contains("nixl-cu12"), "{text}");
        let mut text = String::new();
        large.iter().for_each(|a| a.write(&mut text));
        assert!(text.contains("offload by copy"), "{text}");
        assert!(text.lines().all(|l| l.len() < 400), "{text}");
    }
}
