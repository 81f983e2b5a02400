//! Where stripes land at the receiver.
//!
//! A [`Landing`] says where the bytes of a ticket belong and checks them; [`super::pull`] brings them. Each
//! stream has a [`Lander`] of its own, which takes one stripe at a time: [`Lander::begin`], then
//! [`Lander::take`] until all its bytes are in place, then [`Lander::verdict`], and [`Lander::keep`] once the
//! book has the stripe as complete. Sums are made as soon as a block is whole, while it is in the cache.

use std::borrow::Borrow;
use std::ops::Range;

use windlass_core::digest::{BlockSum, SumTable, sum_block};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{Block, Manifest};
use windlass_core::wire::{Check, Checks, Extent, Fault, Mode, Stripe, StripePlan, Ticket, Verdict};
use xxhash_rust::xxh3::Xxh3;

use super::TcpError;
use super::offer::{block_bytes, check_layout};
use crate::shm::{Loan, Mapping};

/// Contiguous blocks that are received and then summed together, in bytes: few enough to stay in the cache,
/// enough to make few calls.
const PIECE: u64 = 512 << 10;

/// Reads bytes into the slice that it is given.
pub type Fill<'f> = &'f mut dyn FnMut(&mut [u8]) -> Result<(), TcpError>;

/// Where the stripes of one ticket land.
pub trait Landing: Sync {
    /// Whether the ticket fits.
    fn check(&self, ticket: &Ticket) -> Result<(), TcpError>;

    /// The size of a block; `None` if there is no such block.
    fn block_bytes(&self, block: u32) -> Option<u64>;

    /// The image, if it is one: its bytes may also be read into it.
    fn image(&self) -> Option<&ImageLanding<'_>> {
        None
    }

    /// What one stream lands with. Without `verify` nothing is summed and every verdict is good.
    fn lander<'s>(&'s self, ticket: &'s Ticket, plan: &'s StripePlan, verify: bool) -> Box<dyn Lander + 's>;

    /// Every stripe is acknowledged: is the whole right? Called once, before the sender is told that the
    /// transfer is done. Must be quick compared with the time after which a silent stream is lost.
    fn finish(&self) -> Result<(), Fault> {
        Ok(())
    }
}

/// Where one stream lands, stripe after stripe.
pub trait Lander {
    /// A stripe begins. What was left of the one before is forgotten.
    fn begin(&mut self, stripe: Stripe) -> Result<(), TcpError>;

    /// The next `len` bytes of the stripe: calls `fill` for each place that they belong to, in order.
    fn take(&mut self, len: u32, fill: Fill<'_>) -> Result<(), TcpError>;

    /// All bytes of the stripe are here: are they right?
    fn verdict(&mut self, check: &Check) -> Verdict;

    /// The stripe is good and in the book: say so.
    fn keep(&mut self);
}

/// Lands image blocks straight in a mapping of the image's file. Strided blocks go through a buffer of one block.
pub struct ImageLanding<'a> {
    /// The image's layout and cuts.
    pub manifest: &'a Manifest,
    pub mapping: &'a Mapping,
    /// Where in the mapping the image's data begins.
    pub data_start: u64,
    pub kernels: &'a dyn Kernels,
    /// The sums that the blocks must have, from any sender. Without them the senders' own sums count, and only the digest
    /// of the whole shows a sender that lies.
    pub proof: Option<&'a SumTable>,
    /// Called for each block with its sum when its stripe is right and in the book.
    pub landed: &'a (dyn Fn(u32, BlockSum) + Sync),
    /// Called once when every stripe is: is the whole right?
    pub finish: &'a (dyn Fn() -> Result<(), Fault> + Sync),
}

impl std::fmt::Debug for ImageLanding<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageLanding").field("data_start", &self.data_start).finish_non_exhaustive()
    }
}

impl ImageLanding<'_> {
    /// The runs of bytes of a stripe in the image's data, neighbours merged. `None` if one of its blocks is strided.
    pub(super) fn runs(&self, plan: &StripePlan, stripe: &Stripe) -> Option<Vec<Range<u64>>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for block in plan.blocks(stripe).flatten() {
            let block = self.manifest.cuts().block(block).ok().filter(Block::is_contiguous)?;
            for run in self.manifest.byte_runs(&block).filter(|r| !r.is_empty()) {
                match runs.last_mut() {
                    Some(last) if last.end == run.start => last.end = run.end,
                    _ => runs.push(run),
                }
            }
        }
        Some(runs)
    }
}

impl Landing for ImageLanding<'_> {
    fn check(&self, ticket: &Ticket) -> Result<(), TcpError> {
        match &ticket.mode {
            Mode::Full => {}
            Mode::Delta { .. } => {
                return Err(TcpError::Mode {
                    ticket: ticket.id,
                    mode: ticket.mode.as_str(),
                    what: "an image",
                });
            }
        }
        check_layout(ticket, self.manifest)?;
        let need = self.data_start.saturating_add(self.manifest.data_bytes());
        let have = self.mapping.len();
        if have < need {
            return Err(TcpError::Size { ticket: ticket.id, what: "the image's mapping".into(), need, have });
        }
        Ok(())
    }

    fn block_bytes(&self, block: u32) -> Option<u64> {
        block_bytes(self.manifest, block)
    }

    fn image(&self) -> Option<&ImageLanding<'_>> {
        Some(self)
    }

    fn lander<'s>(&'s self, ticket: &'s Ticket, plan: &'s StripePlan, verify: bool) -> Box<dyn Lander + 's> {
        Box::new(ImageLander {
            land: self,
            ticket,
            plan,
            verify,
            stripe: None,
            blocks: Box::new(std::iter::empty()),
            next: None,
            place: Place::Nowhere,
            at: 0,
            piece: Vec::new(),
            sums: Vec::new(),
            hash: None,
            scratch: Vec::new(),
        })
    }

    fn finish(&self) -> Result<(), Fault> {
        (self.finish)()
    }
}

/// What is being filled.
enum Place<'s> {
    Nowhere,
    /// Contiguous blocks, in the mapping.
    Mapped(Loan<'s>),
    /// A strided block, in the buffer.
    Scratch,
}

struct ImageLander<'s> {
    land: &'s ImageLanding<'s>,
    ticket: &'s Ticket,
    plan: &'s StripePlan,
    verify: bool,
    stripe: Option<Stripe>,
    blocks: Box<dyn Iterator<Item = u32> + 's>,
    /// A block that did not fit the last piece.
    next: Option<(u32, Block)>,
    place: Place<'s>,
    /// Bytes of the piece that are here.
    at: usize,
    /// The blocks of the piece, with their bytes.
    piece: Vec<(u32, Block, usize)>,
    sums: Vec<(u32, BlockSum)>,
    hash: Option<Xxh3>,
    scratch: Vec<u8>,
}

impl ImageLander<'_> {
    fn next_block(&mut self) -> Option<(u32, Block)> {
        self.next.take().or_else(|| {
            let id = self.blocks.next()?;
            Some((id, self.land.manifest.cuts().block(id).ok()?))
        })
    }

    fn unit(&self, block: &Block) -> usize {
        self.land.manifest.tensors()[block.tensor as usize].dtype.unit()
    }

    fn ground(&self, why: impl ToString) -> TcpError {
        let stripe = self.stripe.map_or(0, |s| s.id);
        TcpError::Ground { ticket: self.ticket.id, stripe, why: why.to_string() }
    }

    /// Finds the next place: as many contiguous blocks as make a piece, or one strided block.
    fn advance(&mut self) -> Result<(), TcpError> {
        (self.place, self.at) = (Place::Nowhere, 0);
        self.piece.clear();
        let Some((id, block)) = self.next_block() else {
            return Err(self.ground("it has more bytes than its blocks"));
        };
        let bytes = block.units() as usize * self.unit(&block);
        self.piece.push((id, block, bytes));
        if !block.is_contiguous() {
            // A block has at most 64 Ki units of at most 16 bytes: the buffer stays small.
            self.scratch.resize(bytes, 0);
            self.place = Place::Scratch;
            return Ok(());
        }
        let mut run: Range<u64> = self.land.manifest.byte_runs(&block).next().unwrap_or(0..0);
        while let Some((id, block)) = self.next_block() {
            let its = self.land.manifest.byte_runs(&block).next().unwrap_or(0..0);
            if !block.is_contiguous() || its.start != run.end || its.end - run.start > PIECE {
                self.next = Some((id, block));
                break;
            }
            run.end = its.end;
            self.piece.push((id, block, (its.end - its.start) as usize));
        }
        let start = self.land.data_start;
        let loan = self.land.mapping.lend(start + run.start..start + run.end);
        self.place = Place::Mapped(loan.map_err(|e| self.ground(e))?);
        Ok(())
    }

    /// The piece is whole: sums it, and puts a strided block in its place.
    fn settle(&mut self) {
        let land = self.land;
        let bytes = match &self.place {
            Place::Nowhere => return,
            Place::Mapped(loan) => &loan[..],
            Place::Scratch => &self.scratch[..],
        };
        if self.verify {
            let mut rest = bytes;
            for (id, block, len) in &self.piece {
                let (this, others) = rest.split_at(*len);
                let unit = land.manifest.tensors()[block.tensor as usize].dtype.unit();
                self.sums.push((*id, sum_block(land.kernels, block, unit, this)));
                rest = others;
            }
            if let Some(hash) = &mut self.hash {
                hash.update(bytes);
            }
        }
        if let (Place::Scratch, Some((_, block, _))) = (&self.place, self.piece.first()) {
            let mut rest = bytes;
            for run in land.manifest.byte_runs(block) {
                let (this, others) = rest.split_at((run.end - run.start) as usize);
                land.mapping.copy_in(land.data_start + run.start, this);
                rest = others;
            }
        }
        self.place = Place::Nowhere;
    }
}

impl Lander for ImageLander<'_> {
    fn begin(&mut self, stripe: Stripe) -> Result<(), TcpError> {
        self.stripe = Some(stripe);
        let plan = self.plan;
        self.blocks = Box::new(plan.blocks(&stripe).flatten());
        (self.next, self.place) = (None, Place::Nowhere);
        self.sums.clear();
        self.hash = (plan.checks() == Checks::Xxh3).then(Xxh3::new);
        Ok(())
    }

    fn take(&mut self, len: u32, fill: Fill<'_>) -> Result<(), TcpError> {
        let mut left = len as usize;
        while left > 0 {
            if matches!(self.place, Place::Nowhere) {
                self.advance()?;
            }
            let place: &mut [u8] = match &mut self.place {
                Place::Nowhere => &mut [],
                Place::Mapped(loan) => loan,
                Place::Scratch => &mut self.scratch,
            };
            let whole = place.len();
            let take = left.min(whole - self.at);
            fill(&mut place[self.at..self.at + take])?;
            self.at += take;
            left -= take;
            if self.at == whole {
                self.settle();
            }
        }
        Ok(())
    }

    fn verdict(&mut self, check: &Check) -> Verdict {
        self.place = Place::Nowhere;
        match check {
            Check::BlockSums(sums) if !self.verify => {
                let blocks = self.stripe.iter().flat_map(|s| self.plan.blocks(s)).flatten();
                self.sums.extend(blocks.zip(sums.iter().copied()));
                Verdict::Good
            }
            Check::Xxh3(_) if !self.verify => Verdict::Good,
            // The stream has seen that there is one sum for each block.
            Check::BlockSums(sums) => {
                let proof = self.land.proof;
                let wrong = self.sums.iter().zip(sums).find(|((block, ours), theirs)| {
                    ours != *theirs || proof.is_some_and(|table| table.get(*block) != *ours)
                });
                wrong.map_or(Verdict::Good, |((block, _), _)| Verdict::BadBlock(*block))
            }
            Check::Xxh3(theirs) => match self.hash.take() {
                Some(hash) if hash.digest() == *theirs => Verdict::Good,
                Some(_) | None => Verdict::BadStripe,
            },
        }
    }

    fn keep(&mut self) {
        for (block, sum) in self.sums.drain(..) {
            (self.land.landed)(block, sum);
        }
    }
}

/// Lands delta payloads in buffers, one for each payload of the ticket.
#[derive(Debug)]
pub struct PayloadLanding<'a, M = Mapping> {
    /// The buffers, each at least as long as its payload.
    pub buffers: &'a [M],
}

impl<M: Borrow<Mapping> + Sync> Landing for PayloadLanding<'_, M> {
    fn check(&self, ticket: &Ticket) -> Result<(), TcpError> {
        let (id, mode) = (ticket.id, ticket.mode.as_str());
        let Mode::Delta { payloads, .. } = &ticket.mode else {
            return Err(TcpError::Mode { ticket: id, mode, what: "a list of payload buffers" });
        };
        let (need, have) = (payloads.len() as u64, self.buffers.len() as u64);
        if need != have {
            return Err(TcpError::Size {
                ticket: id,
                what: "the list of payload buffers".into(),
                need,
                have,
            });
        }
        for (i, (payload, buffer)) in payloads.iter().zip(self.buffers).enumerate() {
            let (need, have) = (payload.bytes, buffer.borrow().len());
            if have < need {
                return Err(TcpError::Size {
                    ticket: id,
                    what: format!("the buffer of payload {i}"),
                    need,
                    have,
                });
            }
        }
        Ok(())
    }

    fn block_bytes(&self, _block: u32) -> Option<u64> {
        None
    }

    fn lander<'s>(&'s self, ticket: &'s Ticket, _plan: &'s StripePlan, verify: bool) -> Box<dyn Lander + 's> {
        Box::new(PayloadLander {
            buffers: self.buffers,
            ticket,
            verify,
            loan: None,
            at: 0,
            hash: Xxh3::new(),
            proof: None,
        })
    }
}

struct PayloadLander<'s, M> {
    buffers: &'s [M],
    ticket: &'s Ticket,
    verify: bool,
    loan: Option<Loan<'s>>,
    at: usize,
    hash: Xxh3,
    /// What the stripe must have, from any sender.
    proof: Option<u64>,
}

impl<M: Borrow<Mapping> + Sync> Lander for PayloadLander<'_, M> {
    fn begin(&mut self, stripe: Stripe) -> Result<(), TcpError> {
        let ground = |why: String| TcpError::Ground { ticket: self.ticket.id, stripe: stripe.id, why };
        (self.loan, self.at, self.hash) = (None, 0, Xxh3::new());
        let Extent::Bytes { payload, offset, len } = stripe.extent else {
            return Err(ground("it is of blocks, not of a payload".to_owned()));
        };
        let buffer =
            self.buffers.get(payload as usize).ok_or_else(|| ground("no such payload".to_owned()))?;
        self.proof = match &self.ticket.mode {
            Mode::Delta { payloads, .. } => {
                let sums = payloads.get(payload as usize).map(|p| &p.sums[..]).unwrap_or_default();
                sums.get((offset / u64::from(self.ticket.stripe_bytes)) as usize).copied()
            }
            Mode::Full => None,
        };
        let loan = buffer.borrow().lend(offset..offset.saturating_add(len.into()));
        self.loan = Some(loan.map_err(|e| ground(e.to_string()))?);
        Ok(())
    }

    fn take(&mut self, len: u32, fill: Fill<'_>) -> Result<(), TcpError> {
        let mut left = len as usize;
        while left > 0 {
            let take = left.min(PIECE as usize);
            // The stream has seen that the bytes fit the stripe.
            let place = self.loan.as_deref_mut().and_then(|l| l.get_mut(self.at..self.at + take));
            let place = place.unwrap_or_default();
            fill(place)?;
            if self.verify {
                self.hash.update(place);
            }
            self.at += take;
            left -= take;
        }
        Ok(())
    }

    fn verdict(&mut self, check: &Check) -> Verdict {
        self.loan = None;
        match check {
            Check::Xxh3(_) if !self.verify => Verdict::Good,
            Check::Xxh3(sum) if *sum == self.hash.digest() && self.proof.is_none_or(|p| p == *sum) => {
                Verdict::Good
            }
            Check::Xxh3(_) | Check::BlockSums(_) => Verdict::BadStripe,
        }
    }

    fn keep(&mut self) {}
}
