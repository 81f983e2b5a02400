//! One version on its way to many receivers, over modelled links.
//!
//! Owns: [`Broadcast`]. What is asked of whom is decided by [`Claims`], [`neighbours`] and [`Place`], the code that real
//! receivers run; the rest is a model. Every host has one link, with a rate in each direction that its streams share evenly.
//! A message (a claim, or the news of a stripe) takes the latency, and waits behind the bytes that stand in front of the
//! sender's link and of the receiver's. Time goes in small equal steps, so the same input has the same outcome.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use windlass_core::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::{
    BlockVersions, Checks, ClaimPolicy, Claims, DEFAULT_STREAMS, DEFAULT_WINDOW, Deadline, Endpoint, Grant,
    Mode, Place, ProtocolVersion, RELAYS, Source, SourceId, StreamId, StripePlan, Ticket, TicketFields,
    TicketId, TicketKey, neighbours,
};
use windlass_data::tcp::PullConfig;
use windlass_synth::mix;

use crate::error::Error;

/// Relays are named from here on.
const FIRST_RELAY: u32 = 1 << 16;
/// A transfer is cut into more steps than this.
const STEPS: f64 = 2048.0;
/// Steps for one stripe over a free link.
const STEPS_PER_STRIPE: f64 = 4.0;
/// The rates of a step are found by so many rounds of sharing what is left of each link.
const SHARES: usize = 4;
/// How often all streams are looked at in the time of one transfer over a free link.
const LOOKS: f64 = 200.0;
/// No transfer takes so many times as long as one over a free link.
const TOO_LONG: f64 = 2000.0;

/// What is modelled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) receivers: u32,
    /// Hosts that hold equal parts of the version from the beginning.
    pub(super) trainers: u32,
    /// Bytes that each receiver gets.
    pub(super) bytes: f64,
    pub(super) stripes: u32,
    /// Bytes a second of every link, in each direction.
    pub(super) rate: f64,
    /// Seconds that a message takes over free links, one way.
    pub(super) latency: f64,
    /// The longest that bytes stand in front of a link, in seconds; what is more is not sent yet.
    pub(super) queue: f64,
}

impl Model {
    /// The time for all bytes over one free link.
    pub(super) fn alone(&self) -> f64 {
        self.bytes / self.rate
    }

    /// The time if every receiver gets everything from the trainers.
    pub(super) fn direct(&self) -> f64 {
        let all = self.bytes * f64::from(self.receivers) / (f64::from(self.trainers) * self.rate);
        all.max(self.alone())
    }

    fn plan(&self) -> Result<StripePlan, Error> {
        let bug = |e: &dyn std::fmt::Display| Error::Bug(format!("a modelled ticket: {e}"));
        let part = |i: u32| u64::from(self.stripes) * u64::from(i) / u64::from(self.trainers);
        let source = |i: u32| {
            let blocks: BlockRanges = (part(i) as u32..part(i + 1) as u32).into();
            let endpoint: Endpoint = "trainer.example:1".parse().map_err(|e| bug(&e))?;
            Ok(Source { id: SourceId(i), endpoint, blocks, tls: false })
        };
        let wanted = BlockRanges::from(0..self.stripes);
        let model_id = ModelId::new("modelled").map_err(|e| bug(&e))?;
        let fields = TicketFields {
            protocol: ProtocolVersion::CURRENT.major,
            id: TicketId([1; 16]),
            identity: Identity { model_id, incarnation: Incarnation(1), version: 1 },
            layout_hash: LayoutHash([1; 16]),
            cuts_hash: CutsHash([1; 16]),
            digest: StateDigest([1; 16]),
            mode: Mode::Full,
            why: String::new(),
            block_versions: BlockVersions::uniform(&wanted, 1),
            wanted,
            sources: (0..self.trainers).map(source).collect::<Result<_, Error>>()?,
            streams: DEFAULT_STREAMS,
            stripe_bytes: STRIPE,
            checks: Checks::BlockSums,
            deadline: Deadline::starting(0, 1),
            key: TicketKey::new([1; 32]),
            swarm: None,
        };
        let ticket = Ticket::new(fields).map_err(|e| bug(&e))?;
        // Each stripe is one block. How many bytes it stands for is the model's business.
        StripePlan::new(&ticket, |_| Some(STRIPE.into())).map_err(|e| bug(&e))
    }
}

/// The size that stripes have in the ticket.
const STRIPE: u32 = 64 << 10;

/// One stream.
struct Flow {
    from: usize,
    to: usize,
    source: SourceId,
    stream: StreamId,
    /// Claims that have not reached the source.
    asked: usize,
    /// Stripes on their way, with the bytes that are left of them. They follow each other.
    open: VecDeque<(u32, f64)>,
    lost: bool,
    rate: f64,
}

impl Flow {
    fn room(&self) -> bool {
        !self.lost && self.asked + self.open.len() < usize::from(DEFAULT_WINDOW)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Message {
    /// A claim reaches the source of a stream.
    Claim { flow: usize, stripe: u32 },
    /// The receiver of a stream hears of a stripe.
    News { flow: usize, stripe: u32 },
    /// The last byte of a stripe arrives.
    Whole { flow: usize, stripe: u32 },
    /// Those that hear nothing from a host any more give it up.
    Silence { host: usize },
}

/// A host. The trainers' come first.
struct Host {
    up: f64,
    down: f64,
    claims: Option<Claims>,
    lives: bool,
    sent: f64,
    done: Option<f64>,
    /// Bytes that are on their way from it and to it.
    leaving: f64,
    coming: f64,
    /// Streams that end here, and that begin here.
    into: Vec<usize>,
    out: Vec<usize>,
}

/// See the module's documentation.
pub(super) struct Broadcast {
    model: Model,
    hosts: Vec<Host>,
    flows: Vec<Flow>,
    messages: BinaryHeap<Reverse<(u64, u64, Message)>>,
    posted: u64,
    /// Streams that may have something to claim.
    ready: Vec<usize>,
    now: f64,
    step: f64,
    looked: f64,
    lost_after: f64,
}

impl Broadcast {
    pub(super) fn new(model: Model) -> Result<Broadcast, Error> {
        let defaults = PullConfig::default();
        let policy = ClaimPolicy {
            deadline: Duration::MAX,
            stripe_timeout: defaults.stripe_timeout,
            max_bad: defaults.max_bad,
            stall: defaults.stall,
        };
        let plan = model.plan()?;
        let trainers = model.trainers as usize;
        let step = (model.alone() / f64::from(model.stripes) / STEPS_PER_STRIPE).min(model.alone() / STEPS);
        let mut all = Broadcast {
            model,
            hosts: Vec::new(),
            flows: Vec::new(),
            messages: BinaryHeap::new(),
            posted: 0,
            ready: Vec::new(),
            now: 0.0,
            step,
            looked: 0.0,
            lost_after: defaults.lost_after.as_secs_f64(),
        };
        all.hosts.extend((0..trainers).map(|_| Host::new(model.rate, None)));
        for rank in 0..model.receivers {
            let place = Place { rank, receivers: model.receivers };
            all.hosts.push(Host::new(model.rate, Some(Claims::among(plan.clone(), policy, place))));
        }
        for rank in 0..model.receivers {
            let place = Place { rank, receivers: model.receivers };
            let to = trainers + rank as usize;
            let each = place.streams().min(usize::from(DEFAULT_STREAMS) / trainers).max(1);
            let mut index = 0;
            for trainer in 0..trainers {
                for _ in 0..each {
                    all.connect(trainer, to, SourceId(trainer as u32), &mut index)?;
                }
            }
            for other in neighbours(rank, model.receivers, RELAYS) {
                let id = SourceId(FIRST_RELAY + other);
                let claims = all.hosts[to].claims.as_mut();
                claims.map_or(Ok(()), |c| c.add_relay(id)).map_err(|e| Error::Bug(e.to_string()))?;
                all.connect(trainers + other as usize, to, id, &mut index)?;
            }
        }
        Ok(all)
    }

    fn connect(&mut self, from: usize, to: usize, source: SourceId, index: &mut u16) -> Result<(), Error> {
        let stream = StreamId { index: *index, epoch: 0 };
        *index += 1;
        let claims = self.hosts[to].claims.as_mut();
        claims
            .map_or(Ok(()), |c| c.join(stream, source, Duration::ZERO))
            .map_err(|e| Error::Bug(e.to_string()))?;
        let flow = self.flows.len();
        self.hosts[to].into.push(flow);
        self.hosts[from].out.push(flow);
        let open = VecDeque::new();
        self.flows.push(Flow { from, to, source, stream, asked: 0, open, lost: false, rate: 0.0 });
        Ok(())
    }

    /// Gives one receiver's host a link of its own rate.
    #[cfg(test)]
    pub(super) fn set_rate(&mut self, receiver: u32, rate: f64) {
        let host = &mut self.hosts[(self.model.trainers + receiver) as usize];
        (host.up, host.down) = (rate, rate);
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    fn post(&mut self, after: f64, message: Message) {
        let at = ((self.now + after) * 1e9) as u64;
        self.posted += 1;
        self.messages.push(Reverse((at, self.posted, message)));
    }

    /// How long a message from one host to another takes.
    fn delay(&self, from: usize, to: usize) -> f64 {
        let (from, to) = (&self.hosts[from], &self.hosts[to]);
        let queue = |bytes: f64, rate: f64| (bytes / rate).min(self.model.queue);
        self.model.latency + queue(from.leaving, from.up) + queue(to.coming, to.down)
    }

    /// A host's receivers hear of a stripe, each once.
    fn tell(&mut self, from: usize, stripe: u32) {
        let mut told = None;
        for i in 0..self.hosts[from].out.len() {
            let flow = self.hosts[from].out[i];
            let to = self.flows[flow].to;
            // Streams of one receiver follow each other.
            if !self.flows[flow].lost && told.replace(to) != Some(to) {
                let delay = self.delay(from, to);
                self.post(delay, Message::News { flow, stripe });
            }
        }
    }

    fn deliver(&mut self) {
        let now = (self.now * 1e9) as u64;
        while let Some(Reverse((at, _, message))) = self.messages.peek().copied() {
            if at > now {
                break;
            }
            self.messages.pop();
            match message {
                Message::Claim { flow, stripe } => self.claimed(flow, stripe),
                Message::News { flow, stripe } => {
                    let Flow { to, stream, .. } = self.flows[flow];
                    let host = &mut self.hosts[to];
                    if let Some(claims) = host.claims.as_mut().filter(|_| host.lives) {
                        let _ = claims.holds(stream, stripe..stripe + 1);
                        self.ready.push(flow);
                    }
                }
                Message::Whole { flow, stripe } => self.whole(flow, stripe),
                Message::Silence { host } => {
                    let flows = self.hosts[host].out.clone();
                    flows.into_iter().for_each(|flow| self.give_up(flow));
                }
            }
        }
    }

    fn claimed(&mut self, flow: usize, stripe: u32) {
        let bytes = self.model.bytes / f64::from(self.model.stripes);
        let Flow { from, to, lost, .. } = self.flows[flow];
        if lost || !self.hosts[from].lives || !self.hosts[to].lives {
            return;
        }
        self.flows[flow].asked -= 1;
        self.flows[flow].open.push_back((stripe, bytes));
        self.hosts[from].leaving += bytes;
        self.hosts[to].coming += bytes;
        if self.hosts[from].claims.is_none() {
            self.tell(from, stripe);
        }
    }

    fn whole(&mut self, flow: usize, stripe: u32) {
        let (now, at) = (self.time(), self.now);
        let Flow { to, stream, .. } = self.flows[flow];
        let host = &mut self.hosts[to];
        let Some(claims) = host.claims.as_mut().filter(|_| host.lives) else { return };
        if claims.complete(stream, stripe, now).is_ok() {
            self.ready.push(flow);
            if claims.progress().stripes_done == self.model.stripes {
                host.done = Some(at);
            }
            self.tell(to, stripe);
        }
    }

    /// A stream's receiver gives its source up.
    fn give_up(&mut self, flow: usize) {
        let Flow { to, source, .. } = self.flows[flow];
        self.flows[flow].lost = true;
        self.clear(flow);
        let host = &mut self.hosts[to];
        if let Some(claims) = host.claims.as_mut().filter(|_| host.lives) {
            let _ = claims.abandon(source);
            self.ready.extend(&host.into);
        }
    }

    /// What was on its way over a stream is gone.
    fn clear(&mut self, flow: usize) {
        let Flow { from, to, .. } = self.flows[flow];
        let left: f64 = self.flows[flow].open.drain(..).map(|(_, left)| left).sum();
        self.hosts[from].leaving -= left;
        self.hosts[to].coming -= left;
    }

    /// Every stream that may have something to claim claims what it can.
    fn claim(&mut self) {
        let now = self.time();
        let mut ready = std::mem::take(&mut self.ready);
        // Now and then also the others: some claims are allowed only after a while.
        let all = self.now == 0.0 || self.now - self.looked >= (self.model.alone() / LOOKS).max(0.01);
        if all {
            self.looked = self.now;
            ready = (0..self.flows.len()).collect();
        }
        for flow in ready {
            let Flow { from, to, stream, .. } = self.flows[flow];
            if !self.hosts[to].lives || self.hosts[to].done.is_some() {
                continue;
            }
            while self.flows[flow].room() {
                let Some(claims) = self.hosts[to].claims.as_mut() else { break };
                let Ok(Grant::Stripe { stripe, .. }) = claims.claim(stream, now) else { break };
                self.flows[flow].asked += 1;
                let delay = self.delay(to, from);
                self.post(delay, Message::Claim { flow, stripe: stripe.id });
            }
            let claims = self.hosts[to].claims.as_ref();
            if all && !self.flows[flow].lost && claims.is_some_and(|c| c.overdue(stream, now).is_some()) {
                self.give_up(flow);
            }
        }
    }

    /// The rate of each stream: every link is shared evenly by those that it holds up, nearly.
    fn share(&mut self) -> Vec<usize> {
        let mut busy = Vec::new();
        for (i, flow) in self.flows.iter_mut().enumerate() {
            flow.rate = 0.0;
            if !flow.open.is_empty() && self.hosts[flow.from].lives && self.hosts[flow.to].lives {
                busy.push(i);
            }
        }
        let mut up: Vec<f64> = self.hosts.iter().map(|h| h.up).collect();
        let mut down: Vec<f64> = self.hosts.iter().map(|h| h.down).collect();
        let mut left = busy.clone();
        for _ in 0..SHARES {
            let (mut out, mut into) = (vec![0u32; self.hosts.len()], vec![0u32; self.hosts.len()]);
            for f in &left {
                out[self.flows[*f].from] += 1;
                into[self.flows[*f].to] += 1;
            }
            let (spare_up, spare_down) = (up.clone(), down.clone());
            for f in &left {
                let Flow { from, to, .. } = self.flows[*f];
                let more = (spare_up[from] / f64::from(out[from])).min(spare_down[to] / f64::from(into[to]));
                self.flows[*f].rate += more;
                up[from] -= more;
                down[to] -= more;
            }
            left.retain(|f| {
                let flow = &self.flows[*f];
                up[flow.from] > 0.001 * self.hosts[flow.from].up
                    && down[flow.to] > 0.001 * self.hosts[flow.to].down
            });
        }
        busy
    }

    /// Runs until `until`, or until all that live have everything.
    pub(super) fn run(&mut self, until: f64) {
        let end = self.model.alone() * TOO_LONG;
        while self.now < until.min(end) && !self.is_over() {
            self.deliver();
            self.claim();
            let busy = self.share();
            for f in busy {
                let Flow { from, to, rate, .. } = self.flows[f];
                let mut moved = rate * self.step;
                self.hosts[from].sent += moved;
                while let Some((stripe, left)) = self.flows[f].open.front_mut() {
                    let some = moved.min(*left);
                    let stripe = *stripe;
                    *left -= some;
                    moved -= some;
                    let whole = *left <= 0.5;
                    self.hosts[from].leaving -= some;
                    self.hosts[to].coming -= some;
                    if !whole {
                        break;
                    }
                    self.flows[f].open.pop_front();
                    self.post(self.model.latency, Message::Whole { flow: f, stripe });
                }
            }
            self.now += self.step;
        }
    }

    fn is_over(&self) -> bool {
        self.hosts.iter().all(|h| h.claims.is_none() || !h.lives || h.done.is_some())
    }

    /// A receiver's host dies without a word.
    pub(super) fn kill(&mut self, receiver: u32) {
        let host = (self.model.trainers + receiver) as usize;
        if !std::mem::replace(&mut self.hosts[host].lives, false) {
            return;
        }
        let flows: Vec<usize> = self.hosts[host].into.iter().chain(&self.hosts[host].out).copied().collect();
        flows.into_iter().for_each(|flow| self.clear(flow));
        self.post(self.lost_after, Message::Silence { host });
    }

    /// Runs to the end, and kills so many receivers, each at a moment before the time of one transfer is over.
    pub(super) fn run_with_deaths(&mut self, deaths: u32, seed: u64) {
        let pick = |i: u32| mix(seed ^ u64::from(i));
        let mut moments: Vec<(f64, u32)> = (0..deaths)
            .map(|i| {
                let part = (pick(i) % 1000) as f64 / 1000.0;
                (part * self.model.alone(), (pick(i + deaths) % u64::from(self.model.receivers)) as u32)
            })
            .collect();
        moments.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (at, victim) in moments {
            self.run(at);
            self.kill(victim);
        }
        self.run(f64::MAX);
    }

    /// When each receiver had everything; none if it died.
    pub(super) fn done(&self) -> Vec<Option<f64>> {
        let receivers = self.hosts.iter().skip(self.model.trainers as usize);
        receivers.map(|h| if h.lives { Some(h.done.unwrap_or(f64::INFINITY)) } else { None }).collect()
    }

    /// When the last of those that live had everything.
    pub(super) fn last(&self) -> f64 {
        self.done().into_iter().flatten().fold(0.0, f64::max)
    }

    /// What all trainers sent, in versions.
    pub(super) fn sent(&self) -> f64 {
        self.hosts.iter().take(self.model.trainers as usize).map(|h| h.sent).sum::<f64>() / self.model.bytes
    }
}

impl Host {
    fn new(rate: f64, claims: Option<Claims>) -> Host {
        Host {
            up: rate,
            down: rate,
            claims,
            lives: true,
            sent: 0.0,
            done: None,
            leaving: 0.0,
            coming: 0.0,
            into: Vec::new(),
            out: Vec::new(),
        }
    }
}
