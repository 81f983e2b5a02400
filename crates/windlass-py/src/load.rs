//! Load plans: an image into the parameters of an engine.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::Arc;

use pyo3::prelude::*;
use windlass_core::Dtype;
use windlass_core::error::Kind;
use windlass_core::identity::Incarnation;
use windlass_data::history::Trail;
use windlass_data::load::{self, LoadPlan as Plan, PlanCopy, Proof, Target};

use crate::enter::enter;
use crate::errors::Failure;
use crate::held::Held;
use crate::layout::Layout;
use crate::memory::{lend, lend_mut};

/// Source, its offset, the target's number, its offset, sizes, strides in the source, strides in the target.
type GivenCopy = (String, u64, usize, u64, Vec<u64>, Vec<u64>, Vec<u64>);
/// For each name, elements that are copied and all of them.
type Covered = BTreeMap<String, (u64, u64)>;

/// The copies that bring an image of one layout into the parameters of an engine, checked. Everything is counted in
/// elements, as torch counts them.
///
/// Addresses are those of the targets, in their order, and must stay theirs during a call; what is wrong with a plan
/// or its memory is found before the first byte is written. A load that was called off, by its timeout or by Ctrl-C,
/// leaves a mixture: load again, whole.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct LoadPlan {
    plan: Arc<Plan>,
    bytes: Vec<u64>,
}

impl LoadPlan {
    /// The plan, for tables of it.
    pub(crate) fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }
}

#[pymethods]
impl LoadPlan {
    /// `targets` are (name, elements, dtype); `copies` are (source, its offset, index of the target, its offset, sizes,
    /// strides in the source, strides in the target).
    #[new]
    fn new(
        layout: &Layout,
        targets: Vec<(String, u64, String)>,
        copies: Vec<GivenCopy>,
    ) -> PyResult<LoadPlan> {
        let target = |(name, numel, dtype): (String, u64, String)| {
            let dtype =
                Dtype::from_str(&dtype).map_err(|e| Failure::invalid(format!("target {name:?}: {e}")))?;
            Ok(Target { name, numel, dtype })
        };
        let targets = targets.into_iter().map(target).collect::<Result<Vec<_>, Failure>>()?;
        let copy = |(source, source_offset, target, target_offset, sizes, source_strides, target_strides)| {
            PlanCopy { source, source_offset, target, target_offset, sizes, source_strides, target_strides }
        };
        let copies: Vec<PlanCopy> = copies.into_iter().map(copy).collect();
        let plan = Plan::new(Arc::clone(&layout.0), targets, &copies).map_err(Failure::from)?;
        let bytes = plan.target_bytes();
        Ok(LoadPlan { plan: Arc::new(plan), bytes })
    }

    /// Under "targets" and "sources", for each name: (elements that are copied, all of them). Sources are all tensors
    /// of the layout.
    fn coverage(&self) -> BTreeMap<&'static str, Covered> {
        let rows =
            |rows: &[(String, u64, u64)]| rows.iter().map(|(n, c, all)| (n.clone(), (*c, *all))).collect();
        let all = self.plan.coverage();
        BTreeMap::from([("targets", rows(&all.targets)), ("sources", rows(&all.sources))])
    }

    /// Copies all of `held`, or of the tensors in `only`, to the targets: (bytes, copies).
    #[pyo3(signature = (held, addresses, threads = 1, only = None, timeout = 60.0))]
    fn dense(
        &self,
        py: Python<'_>,
        held: &Held,
        addresses: Vec<usize>,
        threads: usize,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<(u64, u64)> {
        enter(py, Some(timeout), |stop| {
            held.read(|lease| {
                self.plan.check_layout(lease.region().manifest())?;
                let image = lease.data();
                lend_mut(&addresses, &self.bytes, image, |targets| {
                    let loaded = self.plan.dense(image, targets, only.as_deref(), threads, stop)?;
                    Ok((loaded.bytes, loaded.copies))
                })
            })
        })
    }

    /// Copies what changed of `held`, or of the tensors in `only`, since the version that the targets hold:
    /// (elements,). Stale, with the reason, and nothing written, if the deltas from there were not kept.
    #[pyo3(signature = (held, base_incarnation, base_version, addresses, threads = 1, only = None, timeout = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn sparse(
        &self,
        py: Python<'_>,
        held: &Held,
        base_incarnation: u64,
        base_version: u64,
        addresses: Vec<usize>,
        threads: usize,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<(u64,)> {
        let base = (Incarnation(base_incarnation), base_version);
        enter(py, Some(timeout), |stop| {
            held.read(|lease| {
                let region = lease.region();
                self.plan.check_layout(region.manifest())?;
                let (identity, digest) = held.known()?;
                let trail = Trail::find(&region.deltas_dir(), region.manifest(), base, (&identity, digest))?;
                let deltas = trail.deltas(crate::held::hands())?;
                let image = lease.data();
                lend_mut(&addresses, &self.bytes, image, |targets| {
                    let loaded = self.plan.sparse(&deltas, image, targets, only.as_deref(), threads, stop)?;
                    Ok((loaded.elements,))
                })
            })
        })
    }

    /// The sums of what the targets hold, box by box, as JSON; see `combine_digests`.
    #[pyo3(signature = (addresses, threads = 1, timeout = 600.0))]
    fn digest(
        &self,
        py: Python<'_>,
        addresses: Vec<usize>,
        threads: usize,
        timeout: f64,
    ) -> PyResult<String> {
        enter(py, Some(timeout), |stop| {
            lend(&addresses, &self.bytes, |targets| {
                let proof = self.plan.digest(targets, threads, stop)?;
                serde_json::to_string(&proof).map_err(|e| Failure::new(Kind::Bug, e.to_string()))
            })
        })
    }

    /// Compares about `count` elements of the targets with `held` and names the tensors that differ.
    #[pyo3(signature = (held, addresses, count, seed, timeout = 600.0))]
    fn sampled_difference(
        &self,
        py: Python<'_>,
        held: &Held,
        addresses: Vec<usize>,
        count: u64,
        seed: u64,
        timeout: f64,
    ) -> PyResult<Vec<String>> {
        enter(py, Some(timeout), |_| {
            held.read(|lease| {
                self.plan.check_layout(lease.region().manifest())?;
                lend(&addresses, &self.bytes, |targets| {
                    Ok(self.plan.differs(lease.data(), targets, count, seed)?)
                })
            })
        })
    }
}

/// Puts the digests of all workers of an engine together, as JSON: the state digest if they hold everything, the sum of
/// every tensor that they hold, the tensors on which they disagree, and those of which not all is held.
#[pyfunction]
pub(crate) fn combine_digests(layout: &Layout, digests: Vec<String>) -> Result<String, Failure> {
    let parse = |text: &String| {
        serde_json::from_str(text)
            .map_err(|e| Failure::invalid(format!("a worker's digest cannot be read: {e}")))
    };
    let proofs: Vec<Proof> = digests.iter().map(parse).collect::<Result<_, _>>()?;
    let other = || Failure::new(Kind::Stale, "a worker's digest is of another layout; ask for it again");
    let combined = load::combine(&layout.0, &proofs).ok_or_else(other)?;
    serde_json::to_string(&combined).map_err(|e| Failure::new(Kind::Bug, e.to_string()))
}
