//! A trainer's rank: the region, and its share of every version.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::copies::{Copy, CopyPlan, CopyTarget, Dim};
use windlass_data::cuda::StreamHandle;
use windlass_data::cuda::encode::Uncollected;
use windlass_data::cuda::offload::Offload;
use windlass_data::early::{Rank, RankSpec, Staging, Way};
use windlass_data::region::{LeaseKind, Memfd, OwnedAttempt, Region, RegionError, RegionSpec, Slots, Writer};
use windlass_data::shm::Mapping;

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::gpu::{Baseline, Gpu, wide};
use crate::held::Held;
use crate::layout::Layout;
use crate::memory::{Memory, lend};

/// Where the first run goes, its bytes, and (count, stride in the slot, stride in the source) of the dimensions.
type Strided = (u64, u64, Vec<(u64, u64, u64)>);

/// Where this rank stands.
enum Turn {
    Idle(Seat),
    Writing(OwnedAttempt, Option<Box<Rank>>),
    /// The tensors of a version are being put beside the slots.
    Staging(Box<Rank>, u64),
    Closed,
}

/// A rank that does nothing just now.
enum Seat {
    /// It only copies.
    Plain(Writer),
    /// It may publish by delta, and work in the background.
    Early(Box<Rank>),
}

/// One rank of a publisher: makes or joins a region and writes its share of each version.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Publisher {
    region: Arc<Region>,
    turn: Mutex<Turn>,
    /// Where tensors of a version wait that is published by delta.
    staging: OnceLock<Staging>,
    rank: u16,
    home: Home,
}

impl Publisher {
    fn of(region: Arc<Region>, rank: u16) -> Result<Publisher, Failure> {
        let turn = Mutex::new(Turn::Idle(Seat::Plain(region.writer(rank)?)));
        Ok(Publisher { region, turn, staging: OnceLock::new(), rank, home: Home::here() })
    }

    fn turn(&self) -> Result<MutexGuard<'_, Turn>, Failure> {
        self.home.check("publisher")?;
        Ok(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn state_error(&self, wanted: &str, turn: &Turn) -> Failure {
        let is = match turn {
            Turn::Idle(_) => "no version is being written",
            Turn::Writing(..) | Turn::Staging(..) => "a version is being written",
            Turn::Closed => "the publisher is closed",
        };
        Failure::invalid(format!("rank {}: cannot {wanted}: {is}", self.rank))
    }
}

#[pymethods]
impl Publisher {
    /// Makes the region `dir`, as rank 0 of `ranks`. A dead publisher's region is replaced; `timeout` is how long to
    /// wait for others to leave it. On one of several hosts it holds only `part`, ranges of blocks from
    /// `Layout.parts`, and belongs to the `incarnation` of the first one.
    #[staticmethod]
    #[pyo3(signature = (dir, model_id, layout, *, ranks = 1, part = None, incarnation = None, group = false,
        memfd = "auto", extra_bytes = 0, timeout = 5.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn create(
        py: Python<'_>,
        dir: PathBuf,
        model_id: String,
        layout: &Layout,
        ranks: u16,
        part: Option<Vec<(u32, u32)>>,
        incarnation: Option<&str>,
        group: bool,
        memfd: &str,
        extra_bytes: u64,
        timeout: f64,
    ) -> PyResult<Publisher> {
        let memfd = match memfd {
            "auto" => Memfd::Auto,
            "never" => Memfd::Never,
            "always" => Memfd::Always,
            other => {
                let text = format!("memfd {other:?} is not one of \"auto\", \"never\" and \"always\"");
                return Err(Failure::invalid(text).into());
            }
        };
        let model_id = ModelId::new(model_id).map_err(|e| Failure::of(e.kind(), &e))?;
        let spec = RegionSpec {
            dir,
            model_id,
            manifest: Arc::clone(&layout.0),
            slots: Slots::Two,
            ranks,
            part: part.map(|ranges| ranges.into_iter().map(|(start, end)| start..end).collect()),
            group,
            memfd,
            extra_bytes,
            incarnation: incarnation.map(parse_incarnation).transpose()?,
        };
        enter(py, Some(timeout), |stop| Publisher::of(Region::create_when_free(&spec, stop)?, 0))
    }

    /// Joins the region `dir` as `rank` once it is there with this layout and rank 0, which made it, is alive.
    #[staticmethod]
    #[pyo3(signature = (dir, layout, *, rank, incarnation = None, timeout = 60.0))]
    fn open(
        py: Python<'_>,
        dir: PathBuf,
        layout: &Layout,
        rank: u16,
        incarnation: Option<String>,
        timeout: f64,
    ) -> PyResult<Publisher> {
        let hash = layout.0.layout_hash();
        enter(py, Some(timeout), |stop| {
            loop {
                // Whoever joins what a dead trainer left keeps rank 0 from making the new one.
                let region = if Region::is_left(&dir) { None } else { Some(Region::open(&dir)) };
                let found = match region {
                    None => "the trainer that made it is dead".to_owned(),
                    Some(Ok(region)) => {
                        let is = region.incarnation().to_string();
                        if incarnation.as_ref().is_some_and(|wanted| *wanted != is) {
                            format!("it is of incarnation {is}")
                        } else if region.manifest().layout_hash() != hash {
                            "it has other tensors".to_owned()
                        } else {
                            match Publisher::of(region, rank) {
                                Ok(publisher) => return Ok(publisher),
                                Err(e) if stop.is_set() || incarnation.is_some() => return Err(e),
                                // The seat of a rank that died a moment ago, in a region that is about to go.
                                Err(_) => "this rank's place in it is taken".to_owned(),
                            }
                        }
                    }
                    Some(Err(RegionError::Absent { .. })) => "it is not there".to_owned(),
                    Some(Err(e)) => return Err(e.into()),
                };
                stop.check().map_err(|s| {
                    let text = format!(
                        "rank {rank} waited for rank 0 to make the region {}: {found}; see whether rank 0 \
                         publishes the same tensors under the same model_id and region_dir",
                        dir.display()
                    );
                    Failure::new(s.kind(), text)
                })?;
                std::thread::sleep(stop.nap().min(Duration::from_millis(10)));
            }
        })
    }

    /// The region's directory.
    #[getter]
    fn dir(&self) -> PathBuf {
        self.region.dir().to_owned()
    }

    /// Which life of the publisher this is.
    #[getter]
    fn incarnation(&self) -> String {
        self.region.incarnation().to_string()
    }

    /// Whether the slots are anonymous memory of the process that made the region.
    #[getter]
    fn is_memfd(&self) -> bool {
        self.region.is_memfd()
    }

    /// The secret of the region's agent, made if there is none yet.
    fn token(&self) -> PyResult<String> {
        let token =
            windlass::service::token::read_or_make(&self.region.token_path()).map_err(Failure::from)?;
        Ok(token.expose().to_owned())
    }

    /// Gives the region's agent the secret of another one, so that receivers need only that.
    fn set_token(&self, token: String) -> PyResult<()> {
        let token = Token::new(token).map_err(|e| Failure::of(e.kind(), &e))?;
        Ok(windlass::service::token::write(&self.region.token_path(), &token).map_err(Failure::from)?)
    }

    /// What the system granted for the region's memory, in words.
    fn report(&self) -> String {
        self.region.report().to_string()
    }

    /// The newest committed version and its digest, once sealed.
    fn newest(&self) -> PyResult<Option<(u64, Option<String>)>> {
        self.home.check("publisher")?;
        let active = self.region.state().active;
        Ok(active.map(|s| (s.version, s.sealed.map(|d| d.to_string()))))
    }

    /// Checks copies against the region: each is (offset in the data, bytes of a run, [(count, stride in the data,
    /// stride in the source)]), all in bytes.
    fn plan(&self, copies: Vec<Strided>) -> PyResult<Copies> {
        let copy = |(at, run, dims): Strided| Copy {
            at,
            run,
            dims: dims.into_iter().map(|(count, to, from)| Dim { count, to, from }).collect(),
        };
        let copies = copies.into_iter().map(copy).collect();
        let plan = CopyPlan::new(copies, &self.region).map_err(|e| Failure::of(e.kind(), &e))?;
        Ok(Copies { plan, region: Arc::clone(&self.region), device: Mutex::default() })
    }

    /// Begins `version` together with all other ranks.
    fn begin(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<()> {
        enter(py, Some(timeout), |stop| {
            let mut turn = self.turn()?;
            let seat = match std::mem::replace(&mut *turn, Turn::Closed) {
                Turn::Idle(seat) => seat,
                other => {
                    let error = self.state_error("begin", &other);
                    *turn = other;
                    return Err(error);
                }
            };
            let (next, result) = match seat {
                Seat::Plain(writer) => match writer.into_attempt(version, stop) {
                    Ok(attempt) => (Turn::Writing(attempt, None), Ok(())),
                    Err(back) => {
                        let (writer, e) = *back;
                        (Turn::Idle(Seat::Plain(writer)), Err(e.into()))
                    }
                },
                Seat::Early(mut rank) => match rank.begin(version, stop) {
                    Ok(attempt) => (Turn::Writing(attempt, Some(rank)), Ok(())),
                    Err(e) => (Turn::Idle(Seat::Early(rank)), Err(e.into())),
                },
            };
            *turn = next;
            result
        })
    }

    /// From now on versions may be published by delta: this rank answers for `blocks`, ranges of whole blocks of
    /// `layout`, all of what it writes. `threads` work in the background.
    fn deltas(&self, layout: &Layout, blocks: Vec<(u32, u32)>, threads: usize) -> PyResult<()> {
        if layout.0.cuts_hash() != self.region.manifest().cuts_hash() {
            let text = format!(
                "rank {}: the region is cut into other blocks than this rank's layout; give all ranks the same offload_mode",
                self.rank
            );
            return Err(Failure::invalid(text).into());
        }
        let mut turn = self.turn()?;
        match std::mem::replace(&mut *turn, Turn::Closed) {
            Turn::Idle(Seat::Plain(writer)) => {
                let blocks = blocks.into_iter().map(|(start, end)| start..end).collect();
                let (seat, result) = match Rank::new(writer, RankSpec { blocks, threads }) {
                    Ok(rank) => (Seat::Early(Box::new(rank)), Ok(())),
                    Err(back) => {
                        let (writer, e) = *back;
                        (Seat::Plain(writer), Err(Failure::from(e).into()))
                    }
                };
                *turn = Turn::Idle(seat);
                result
            }
            other => {
                let error = self.state_error("change how it publishes", &other);
                *turn = other;
                Err(error.into())
            }
        }
    }

    /// Why `version` has to be a copy; `None` if it can be a delta. Waits for the version before, and raises its error.
    fn needs_copy(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<Option<String>> {
        enter(py, Some(timeout), |stop| {
            let mut turn = self.turn()?;
            match &mut *turn {
                Turn::Idle(Seat::Early(rank)) => Ok(match rank.way(version, stop)? {
                    Way::Delta { .. } => None,
                    Way::Copy { why } => Some(why),
                }),
                Turn::Idle(Seat::Plain(_)) => Ok(Some("this rank publishes by copies only".into())),
                other => Err(self.state_error("begin", other)),
            }
        })
    }

    /// Begins `version` as a delta from the version before: `slot` and `copy` fill memory of this process.
    fn stage(&self, version: u64) -> PyResult<()> {
        let mut turn = self.turn()?;
        if self.staging.get().is_none() {
            let staging = Staging::new(self.region.manifest().data_bytes()).map_err(Failure::from)?;
            // Only one thread has the turn.
            let _ = self.staging.set(staging);
        }
        match std::mem::replace(&mut *turn, Turn::Closed) {
            Turn::Idle(Seat::Early(rank)) => {
                *turn = Turn::Staging(rank, version);
                Ok(())
            }
            other => {
                let error = self.state_error("begin a delta", &other);
                *turn = other;
                Err(error.into())
            }
        }
    }

    /// Publishes what was staged: returns at once, and works in the background for at most `timeout`.
    fn publish(&self, timeout: f64) -> PyResult<()> {
        let timeout = crate::held::seconds("a timeout", timeout)?;
        let mut turn = self.turn()?;
        match (std::mem::replace(&mut *turn, Turn::Closed), self.staging.get()) {
            (Turn::Staging(mut rank, version), Some(staging)) => {
                let result = rank.publish(version, Box::new(staging.clone()), timeout);
                *turn = Turn::Idle(Seat::Early(rank));
                Ok(result.map_err(Failure::from)?)
            }
            (other, _) => {
                let error = self.state_error("publish a delta", &other);
                *turn = other;
                Err(error.into())
            }
        }
    }

    /// Publishes what `Baseline.compare` found, which leads from the newest version, `base`, to `version`: returns at once,
    /// and works in the background for at most `timeout`.
    fn publish_compared(&self, baseline: &Baseline, base: u64, version: u64, timeout: f64) -> PyResult<()> {
        let timeout = crate::held::seconds("a timeout", timeout)?;
        let mut turn = self.turn()?;
        let Turn::Idle(Seat::Early(rank)) = &mut *turn else {
            return Err(self.state_error("publish a delta", &turn).into());
        };
        let newest = self.region.state().active.map(|s| (self.region.incarnation(), s.version));
        if newest != Some(baseline.which(base)) {
            let text =
                format!("the records begin from version {base} of this baseline, which is not the newest");
            return Err(Failure::new(Kind::Stale, format!("{text}: publish a copy")).into());
        }
        let source = Uncollected { baseline: Arc::clone(&baseline.made), target: baseline.which(version) };
        Ok(rank.publish(version, Box::new(source), timeout).map_err(Failure::from)?)
    }

    /// Waits for the background work of the last version, and raises its error. Nothing if there is none.
    fn settle(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        enter(py, Some(timeout), |stop| match &mut *self.turn()? {
            Turn::Idle(Seat::Early(rank)) => Ok(rank.settle(stop)?),
            Turn::Idle(Seat::Plain(_)) | Turn::Writing(..) | Turn::Staging(..) | Turn::Closed => Ok(()),
        })
    }

    /// The newest version that was committed or handed out by delta.
    #[getter]
    fn newest_number(&self) -> PyResult<Option<u64>> {
        self.home.check("publisher")?;
        let committed = self.region.state().active.map(|s| s.version);
        // Whoever asks while a call is under way is not kept waiting with the interpreter in its hands.
        let Ok(turn) = self.turn.try_lock() else { return Ok(committed) };
        Ok(match &*turn {
            Turn::Idle(Seat::Early(rank)) | Turn::Writing(_, Some(rank)) | Turn::Staging(rank, _) => {
                rank.newest()
            }
            Turn::Idle(Seat::Plain(_)) | Turn::Writing(_, None) | Turn::Closed => committed,
        })
    }

    /// The data of the slot that is being written, or of the memory where a delta is staged.
    fn slot(&self) -> PyResult<Memory> {
        let turn = self.turn()?;
        match (&*turn, self.staging.get()) {
            (Turn::Writing(attempt, _), _) => {
                let mapping = attempt.mapping();
                let data = mapping.bytes(self.region.data_start()..mapping.len());
                Ok(Memory::new(data, true, Arc::<Region>::clone(&self.region)))
            }
            (Turn::Staging(..), Some(staging)) => {
                let memory = staging.memory();
                Ok(Memory::new(memory.bytes(0..memory.len()), true, Arc::<Mapping>::clone(memory)))
            }
            (other, _) => Err(self.state_error("write", other).into()),
        }
    }

    /// Copies the memory at `addresses`, one for each copy of the plan, into the slot.
    fn copy(
        &self,
        py: Python<'_>,
        copies: &Copies,
        addresses: Vec<usize>,
        threads: usize,
        timeout: f64,
    ) -> PyResult<()> {
        if !Arc::ptr_eq(&copies.region, &self.region) {
            return Err(Failure::new(Kind::Bug, "copies were planned for another region").into());
        }
        enter(py, Some(timeout), |stop| {
            let turn = self.turn()?;
            let into: &dyn CopyTarget = match (&*turn, self.staging.get()) {
                (Turn::Writing(attempt, _), _) => &**attempt,
                (Turn::Staging(..), Some(staging)) => staging,
                (other, _) => return Err(self.state_error("write", other)),
            };
            lend(&addresses, copies.plan.spans(), |sources| {
                let result = copies.plan.run_into(into, sources, threads, stop);
                result.map_err(|e| Failure::of(e.kind(), &e))
            })
        })
    }

    /// Copies tensors of a GPU at `addresses`, one for each copy of the plan, into the slot, once `stream` has come to where
    /// it is now. Where `casts` is true, the tensor is fp32, with strides of fp32, and the slot gets bf16. Answers whether
    /// DMA went straight into the slot; if not, the system refused to pin it.
    #[pyo3(signature = (gpu, copies, addresses, stream = 0, casts = None, timeout = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn copy_device(
        &self,
        py: Python<'_>,
        gpu: &Gpu,
        copies: &Copies,
        addresses: Vec<usize>,
        stream: u64,
        casts: Option<Vec<bool>>,
        timeout: f64,
    ) -> PyResult<bool> {
        if !Arc::ptr_eq(&copies.region, &self.region) {
            return Err(Failure::new(Kind::Bug, "copies were planned for another region").into());
        }
        enter(py, Some(timeout), |stop| {
            let turn = self.turn()?;
            let Turn::Writing(attempt, _) = &*turn else { return Err(self.state_error("write", &turn)) };
            let casts = casts.unwrap_or_default();
            let mut device = copies.device.lock().unwrap_or_else(PoisonError::into_inner);
            let ready = device.take().filter(|(made_for, offload)| {
                *made_for == casts && offload.gpu().facts().uuid == gpu.0.facts().uuid
            });
            let mut offload = match ready {
                Some((_, offload)) => offload,
                None => Offload::new(&gpu.0, &self.region, &copies.plan, &casts)?,
            };
            let done = offload.run(attempt, &wide(&addresses), StreamHandle(stream), stop);
            *device = Some((casts, offload));
            Ok(done?.is_direct)
        })
    }

    /// Says that this rank's share is written, and returns when the version is committed: (attempt, slot). `baseline`
    /// holds the same version, and knows its sums.
    #[pyo3(signature = (timeout, baseline = None))]
    fn commit(&self, py: Python<'_>, timeout: f64, baseline: Option<&Baseline>) -> PyResult<(u64, usize)> {
        enter(py, Some(timeout), |stop| {
            let mut turn = self.turn()?;
            let sums = match (&*turn, baseline) {
                (Turn::Writing(attempt, Some(_)), Some(baseline)) => Some(baseline.sums(attempt.version())?),
                _ => None,
            };
            let (seat, committed) = match std::mem::replace(&mut *turn, Turn::Closed) {
                Turn::Writing(attempt, None) => {
                    let (writer, result) = attempt.done(stop);
                    (Seat::Plain(writer), result.map_err(Failure::from))
                }
                Turn::Writing(attempt, Some(mut rank)) => {
                    let result = rank.commit(attempt, sums, stop).map_err(Failure::from);
                    (Seat::Early(rank), result)
                }
                other => {
                    let error = self.state_error("commit", &other);
                    *turn = other;
                    return Err(error);
                }
            };
            *turn = Turn::Idle(seat);
            let committed = committed?;
            Ok((committed.id, committed.slot))
        })
    }

    /// Gives up the version that is being written, for all ranks. Nothing happens if there is none.
    fn abort(&self) -> PyResult<()> {
        let mut turn = self.turn()?;
        *turn = match std::mem::replace(&mut *turn, Turn::Closed) {
            Turn::Writing(attempt, None) => Turn::Idle(Seat::Plain(attempt.abort())),
            Turn::Writing(attempt, Some(mut rank)) => {
                rank.abort(attempt);
                Turn::Idle(Seat::Early(rank))
            }
            Turn::Staging(rank, _) => Turn::Idle(Seat::Early(rank)),
            other @ (Turn::Idle(_) | Turn::Closed) => other,
        };
        Ok(())
    }

    /// Waits until `version` is sealed, and returns its digest.
    fn wait_sealed(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<String> {
        self.home.check("publisher")?;
        enter(py, Some(timeout), |stop| {
            loop {
                let bell = self.region.bell();
                let state = self.region.state();
                let mut slots = [state.active, state.inactive].into_iter().flatten();
                if let Some(digest) = slots.find(|s| s.version == version).and_then(|s| s.sealed) {
                    return Ok(digest.to_string());
                }
                match state.active.map(|s| s.version) {
                    Some(newest) if newest > version => {
                        let text =
                            format!("version {version} is no longer kept here; the newest is {newest}");
                        return Err(Failure::new(Kind::Stale, text));
                    }
                    Some(_) | None => {}
                }
                stop.check().map_err(|s| {
                    let text =
                        format!("version {version} was not sealed in time; see whether the agent runs");
                    Failure::new(s.kind(), text)
                })?;
                self.region.wait(bell, stop.nap());
            }
        })
    }

    /// The newest committed version, held in place for at most `seconds`.
    fn hold(&self, seconds: f64) -> PyResult<Held> {
        self.home.check("publisher")?;
        let seconds = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Failure::invalid(format!("{seconds} s is not a time to hold anything")))?;
        loop {
            let Some(active) = self.region.state().active else {
                return Err(Failure::new(Kind::NotFound, "nothing was committed yet").into());
            };
            match self.region.lease(active.id, LeaseKind::Map, seconds) {
                Ok(lease) => {
                    let path = self.region.slot_path(active.slot);
                    let which = (self.region.incarnation(), active.version);
                    return Ok(Held::new(lease, path, which, active.sealed));
                }
                // Replaced since the look above.
                Err(RegionError::LeaseGone { .. }) => {}
                Err(e) => return Err(Failure::from(e).into()),
            }
        }
    }

    /// Gives up its place in the region.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // What is under way in the background is ended and waited for.
        enter(py, None, |_| {
            *self.turn()? = Turn::Closed;
            Ok(())
        })
    }

    /// Removes the region if no other process has it open, and says whether it is gone. After `close`.
    fn discard(&self) -> PyResult<bool> {
        let turn = self.turn()?;
        match &*turn {
            Turn::Closed => Ok(self.region.discard().map_err(Failure::from)?),
            Turn::Idle(_) | Turn::Writing(..) | Turn::Staging(..) => {
                Err(self.state_error("remove the region", &turn).into())
            }
        }
    }
}

/// Copies that were found to fit their region.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Copies {
    plan: CopyPlan,
    region: Arc<Region>,
    /// What a GPU needs for them, and for which casts it was made.
    device: Mutex<Option<(Vec<bool>, Offload)>>,
}

impl Copies {
    pub(crate) fn plan(&self) -> &CopyPlan {
        &self.plan
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

#[pymethods]
impl Copies {
    /// How many bytes they copy.
    #[getter]
    fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    fn __len__(&self) -> usize {
        self.plan.spans().len()
    }
}

pub(crate) fn parse_incarnation(text: &str) -> Result<Incarnation, Failure> {
    let number = u64::from_str_radix(text, 16);
    number.map(Incarnation).map_err(|_| Failure::invalid(format!("{text:?} is not an incarnation")))
}
