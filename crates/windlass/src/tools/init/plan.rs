//! Which trainer and engine the files are for, and which files those are.
//!
//! Owns: the order of frameworks, which engines each of them can have, the files, and the commands to type. Pure. The files in
//! `files/` are copied as they are, so that they can be linted and run where they stand.

use clap::ValueEnum;

use super::InitError;

/// What trains, the more specific first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Trainer {
    Trl,
    Verl,
    Skyrl,
    Openrlhf,
    Transformers,
    Lightning,
    Accelerate,
    Deepspeed,
    Torch,
}

/// What serves: a server, or a program of your own in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    Vllm,
    Sglang,
    Python,
}

/// How a framework meets its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// TRL tells a vLLM server of each version.
    Trl,
    /// The framework starts its engines itself.
    Whole,
    /// A trainer that publishes, for any engine that follows.
    Publisher,
}

/// A file to write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Template {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    pub(super) mode: u32,
}

macro_rules! text {
    ($name:literal, $from:literal) => {
        Template { name: $name, text: include_str!(concat!("files/", $from)), mode: 0o644 }
    };
}

macro_rules! script {
    ($name:literal, $from:literal) => {
        Template { mode: 0o755, ..text!($name, $from) }
    };
}

impl Trainer {
    /// Its name, which is also that of its package.
    pub(super) fn name(self) -> &'static str {
        match self {
            Trainer::Trl => "trl",
            Trainer::Verl => "verl",
            Trainer::Skyrl => "skyrl",
            Trainer::Openrlhf => "openrlhf",
            Trainer::Transformers => "transformers",
            Trainer::Lightning => "lightning",
            Trainer::Accelerate => "accelerate",
            Trainer::Deepspeed => "deepspeed",
            Trainer::Torch => "torch",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Trainer::Trl => Kind::Trl,
            Trainer::Verl | Trainer::Skyrl | Trainer::Openrlhf => Kind::Whole,
            Trainer::Transformers
            | Trainer::Lightning
            | Trainer::Accelerate
            | Trainer::Deepspeed
            | Trainer::Torch => Kind::Publisher,
        }
    }

    /// The engines that it can have, the preferred first.
    fn engines(self) -> &'static [Engine] {
        match self {
            Trainer::Trl | Trainer::Skyrl | Trainer::Openrlhf => &[Engine::Vllm],
            Trainer::Verl => &[Engine::Vllm, Engine::Sglang],
            Trainer::Transformers
            | Trainer::Lightning
            | Trainer::Accelerate
            | Trainer::Deepspeed
            | Trainer::Torch => &[Engine::Vllm, Engine::Sglang, Engine::Python],
        }
    }
}

impl Engine {
    /// Its name, which is also that of its package, if it needs one.
    pub(super) fn name(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
            Engine::Python => "python",
        }
    }
}

/// All packages to look for: trainers, engines, and what the scripts import besides.
pub(super) fn packages() -> Vec<&'static str> {
    let trainers = Trainer::value_variants().iter().map(|t| t.name());
    trainers.chain(["vllm", "sglang", "datasets", "windlass"]).collect()
}

/// A trainer and an engine that fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) trainer: Trainer,
    pub(super) engine: Engine,
}

impl Plan {
    /// What was asked for, else the first that is there, else plain torch and a follower.
    pub(super) fn choose(
        trainer: Option<Trainer>,
        engine: Option<Engine>,
        there: impl Fn(&str) -> bool,
    ) -> Result<Plan, InitError> {
        let fits = |trainer: Trainer| engine.is_none_or(|engine| trainer.engines().contains(&engine));
        if let (Some(trainer), Some(engine)) = (trainer, engine)
            && !fits(trainer)
        {
            return Err(InitError::Unfit { trainer, engine, engines: trainer.engines() });
        }
        let mut known = Trainer::value_variants().iter().copied();
        let first = || known.find(|t| there(t.name()) && fits(*t)).unwrap_or(Trainer::Torch);
        let trainer = trainer.unwrap_or_else(first);
        let engines = trainer.engines();
        let found = || engines.iter().copied().find(|e| there(e.name()));
        // A publisher without a server is followed in Python; the other frameworks have no such engine.
        let fallback = || if engines.contains(&Engine::Python) { Engine::Python } else { Engine::Vllm };
        let engine = engine.or_else(found).unwrap_or_else(fallback);
        Ok(Plan { trainer, engine })
    }

    /// Whether the framework starts its engines, so that there is no script for one.
    pub(super) fn starts_engines(self) -> bool {
        self.trainer.kind() == Kind::Whole
    }

    /// The files, the configuration first.
    pub(super) fn files(self) -> Vec<Template> {
        let config = match (self.trainer.kind(), self.engine) {
            (Kind::Trl | Kind::Whole, _) => text!("windlass.toml", "framework.toml"),
            (Kind::Publisher, Engine::Vllm) => text!("windlass.toml", "receive_vllm.toml"),
            (Kind::Publisher, Engine::Sglang) => text!("windlass.toml", "receive_sglang.toml"),
            (Kind::Publisher, Engine::Python) => text!("windlass.toml", "receive.toml"),
        };
        let engine = match (self.trainer.kind(), self.engine) {
            (Kind::Trl, _) => Some(script!("serve.sh", "serve_trl.sh")),
            (Kind::Whole, _) => None,
            (Kind::Publisher, Engine::Vllm) => Some(script!("serve.sh", "serve_vllm.sh")),
            (Kind::Publisher, Engine::Sglang) => Some(script!("serve.sh", "serve_sglang.sh")),
            (Kind::Publisher, Engine::Python) => Some(text!("follow.py", "follow.py")),
        };
        [config, self.train()].into_iter().chain(engine).collect()
    }

    /// The trainer's script. A server needs a language model; a follower takes anything.
    fn train(self) -> Template {
        let plain = self.engine == Engine::Python;
        match self.trainer {
            Trainer::Trl => text!("train.py", "trl_grpo.py"),
            Trainer::Verl => script!("train.sh", "verl.sh"),
            Trainer::Skyrl => script!("train.sh", "skyrl.sh"),
            Trainer::Openrlhf => script!("train.sh", "openrlhf.sh"),
            Trainer::Transformers => text!("train.py", "causal_transformers.py"),
            Trainer::Lightning if plain => text!("train.py", "plain_lightning.py"),
            Trainer::Lightning => text!("train.py", "causal_lightning.py"),
            Trainer::Accelerate if plain => text!("train.py", "plain_accelerate.py"),
            Trainer::Accelerate => text!("train.py", "causal_accelerate.py"),
            Trainer::Deepspeed if plain => text!("train.py", "plain_deepspeed.py"),
            Trainer::Deepspeed => text!("train.py", "causal_deepspeed.py"),
            Trainer::Torch if plain => text!("train.py", "plain_torch.py"),
            Trainer::Torch => text!("train.py", "causal_torch.py"),
        }
    }

    /// The packages that the trainer's script needs.
    pub(super) fn needs(self) -> Vec<&'static str> {
        let causal = self.trainer.kind() == Kind::Publisher && self.engine != Engine::Python;
        let mut needs = vec!["windlass", "torch", self.trainer.name()];
        needs.extend(causal.then_some("transformers"));
        needs.extend((self.trainer == Trainer::Trl).then_some("datasets"));
        needs.dedup();
        needs
    }

    /// The commands to type, in their order, with the word for the interpreter and whether scripts would find another one.
    pub(super) fn commands(self, python: &str, elsewhere: bool) -> Vec<String> {
        let with = if elsewhere { format!("PYTHON={python} ") } else { String::new() };
        let train = match self.trainer {
            Trainer::Verl => format!("{with}./train.sh actor_rollout_ref.model.path=MODEL ..."),
            Trainer::Skyrl => format!("{with}./train.sh trainer.policy.model.path=MODEL ..."),
            Trainer::Openrlhf => format!("{with}./train.sh --actor.model_name_or_path MODEL ..."),
            Trainer::Deepspeed => format!("{python} -m torch.distributed.run --nproc-per-node 1 train.py"),
            Trainer::Trl
            | Trainer::Transformers
            | Trainer::Lightning
            | Trainer::Accelerate
            | Trainer::Torch => format!("{python} train.py"),
        };
        match (self.trainer.kind(), self.engine) {
            (Kind::Whole, _) => vec![train],
            // The trainer asks the server when it starts.
            (Kind::Trl, _) => vec!["./serve.sh".into(), train],
            // The trainer writes the checkpoint that the server starts from.
            (Kind::Publisher, Engine::Vllm) => vec![train, "./serve.sh".into()],
            (Kind::Publisher, Engine::Sglang) => vec![train, format!("{with}./serve.sh")],
            (Kind::Publisher, Engine::Python) => vec![train, format!("{python} follow.py")],
        }
    }

    /// What else is there and would fit: trainers, and engines.
    pub(super) fn others(self, there: impl Fn(&str) -> bool) -> (Vec<&'static str>, Vec<&'static str>) {
        let fits = |t: &&Trainer| **t != self.trainer && t.engines().contains(&self.engine);
        let trainers = Trainer::value_variants().iter().filter(fits).map(|t| t.name());
        let engines = self.trainer.engines().iter().filter(|e| **e != self.engine).map(|e| e.name());
        (trainers.filter(|name| there(name)).collect(), engines.filter(|name| there(name)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(trainer: Option<Trainer>, engine: Option<Engine>, there: &[&str]) -> Plan {
        Plan::choose(trainer, engine, |name| there.contains(&name)).unwrap()
    }

    #[test]
    fn the_first_framework_that_is_there_and_fits_is_chosen() {
        let all = packages();
        for (trainer, engine, there, want) in [
            (None, None, &[][..], (Trainer::Torch, Engine::Python)),
            (None, None, &["torch", "transformers", "sglang"], (Trainer::Transformers, Engine::Sglang)),
            (None, None, &all, (Trainer::Trl, Engine::Vllm)),
            (None, Some(Engine::Sglang), &all, (Trainer::Verl, Engine::Sglang)),
            (None, Some(Engine::Python), &all, (Trainer::Transformers, Engine::Python)),
            (None, None, &["verl", "torch", "sglang"], (Trainer::Verl, Engine::Sglang)),
            (None, None, &["verl", "torch"], (Trainer::Verl, Engine::Vllm)),
            (Some(Trainer::Trl), None, &["sglang"], (Trainer::Trl, Engine::Vllm)),
            (Some(Trainer::Torch), None, &all, (Trainer::Torch, Engine::Vllm)),
        ] {
            let plan = chosen(trainer, engine, there);
            assert_eq!((plan.trainer, plan.engine), want, "{there:?}");
        }
        let refused = Plan::choose(Some(Trainer::Trl), Some(Engine::Sglang), |_| true).unwrap_err();
        assert_eq!(refused.to_string(), "trl does not run with the engine sglang");
    }

    #[test]
    fn files_are_short_and_say_what_they_are() {
        for &trainer in Trainer::value_variants() {
            for &engine in trainer.engines() {
                for file in (Plan { trainer, engine }).files() {
                    let lines = file.text.lines().count();
                    assert!(lines <= 40, "{trainer:?} {engine:?} {}: {lines}", file.name);
                    assert!(file.text.starts_with(['#', '"']), "{}", file.name);
                }
            }
        }
    }
}
