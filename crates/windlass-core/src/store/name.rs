//! The names of objects.
//!
//! Owns: [`Object`], in both directions. Must not: know the model's id or the URL, which stand before a name.

use std::fmt;
use std::str::FromStr;

use super::ObjectHash;
use crate::identity::{Incarnation, Version};

/// An object of one model in a store. Its text is the name below the model's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Object {
    Head,
    /// A head where a store has no compare-and-swap.
    NumberedHead(u64),
    /// Shows that the store refuses to write an object twice.
    Probe,
    Manifest {
        incarnation: Incarnation,
        hash: ObjectHash,
    },
    Delta {
        incarnation: Incarnation,
        base: Version,
        target: Version,
        hash: ObjectHash,
    },
    Part {
        incarnation: Incarnation,
        start: Version,
        part: u32,
        hash: ObjectHash,
    },
    Sums {
        incarnation: Incarnation,
        start: Version,
        hash: ObjectHash,
    },
    Anchor {
        incarnation: Incarnation,
        start: Version,
        hash: ObjectHash,
    },
    Version {
        incarnation: Incarnation,
        version: Version,
    },
}

impl Object {
    /// The incarnation that it is of; none for a head, which is of the model.
    pub fn incarnation(&self) -> Option<Incarnation> {
        match self {
            Object::Head | Object::NumberedHead(_) | Object::Probe => None,
            Object::Manifest { incarnation, .. }
            | Object::Delta { incarnation, .. }
            | Object::Part { incarnation, .. }
            | Object::Sums { incarnation, .. }
            | Object::Anchor { incarnation, .. }
            | Object::Version { incarnation, .. } => Some(*incarnation),
        }
    }

    /// The version that it is the index of.
    pub fn as_version(&self) -> Option<(Incarnation, Version)> {
        match self {
            Object::Version { incarnation, version } => Some((*incarnation, *version)),
            Object::Head
            | Object::NumberedHead(_)
            | Object::Probe
            | Object::Manifest { .. }
            | Object::Delta { .. }
            | Object::Part { .. }
            | Object::Sums { .. }
            | Object::Anchor { .. } => None,
        }
    }

    /// Whether a version could need it, as far as names say.
    pub fn may_be_needed_by(&self, incarnation: Incarnation, version: Version) -> bool {
        let reaches = match *self {
            Object::Head | Object::NumberedHead(_) | Object::Probe => false,
            Object::Manifest { .. } => true,
            Object::Delta { target, .. } => target <= version,
            Object::Part { start, .. } | Object::Sums { start, .. } | Object::Anchor { start, .. } => {
                start <= version
            }
            Object::Version { version: own, .. } => own == version,
        };
        reaches && self.incarnation() == Some(incarnation)
    }

    /// The name of the directory of an incarnation.
    pub fn folder(incarnation: Incarnation) -> String {
        format!("{:016x}", incarnation.0)
    }

    /// The hash that its bytes must have, if the name says so.
    pub fn hash(&self) -> Option<ObjectHash> {
        match self {
            Object::Head | Object::NumberedHead(_) | Object::Probe | Object::Version { .. } => None,
            Object::Manifest { hash, .. }
            | Object::Delta { hash, .. }
            | Object::Part { hash, .. }
            | Object::Sums { hash, .. }
            | Object::Anchor { hash, .. } => Some(*hash),
        }
    }

    /// Reads a name below the model's id; `None` if it is no name of ours.
    pub fn parse(name: &str) -> Option<Object> {
        let object = Object::read(name)?;
        // There is one way to write each name.
        (object.to_string() == name).then_some(object)
    }

    fn read(name: &str) -> Option<Object> {
        let pieces: Vec<&str> = name.split('/').collect();
        match *pieces {
            ["head.json"] => Some(Object::Head),
            ["probe"] => Some(Object::Probe),
            ["head", number] => Some(Object::NumberedHead(number.strip_suffix(".json")?.parse().ok()?)),
            [incarnation, ref rest @ ..] => {
                let incarnation = Incarnation(u64::from_str_radix(incarnation, 16).ok()?);
                match *rest {
                    [manifest] => {
                        let hash = hash(manifest.strip_prefix("manifest-")?.strip_suffix(".json")?)?;
                        Some(Object::Manifest { incarnation, hash })
                    }
                    ["deltas", delta] => {
                        let mut fields = delta.strip_suffix(".wdelta")?.splitn(3, '-');
                        let (base, target) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
                        Some(Object::Delta { incarnation, base, target, hash: hash(fields.next()?)? })
                    }
                    ["versions", version] => {
                        let version = version.strip_suffix(".json")?.parse().ok()?;
                        Some(Object::Version { incarnation, version })
                    }
                    ["anchors", start, object] => {
                        let (start, (kind, end)) = (start.parse().ok()?, object.split_once('-')?);
                        Some(match kind {
                            "sums" => Object::Sums { incarnation, start, hash: hash(end)? },
                            "anchor" => {
                                Object::Anchor { incarnation, start, hash: hash(end.strip_suffix(".json")?)? }
                            }
                            part => Object::Part {
                                incarnation,
                                start,
                                part: part.parse().ok()?,
                                hash: hash(end)?,
                            },
                        })
                    }
                    _ => None,
                }
            }
            [] => None,
        }
    }
}

fn hash(text: &str) -> Option<ObjectHash> {
    ObjectHash::from_str(text).ok()
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(incarnation) = self.incarnation() {
            write!(f, "{}/", Object::folder(incarnation))?;
        }
        match self {
            Object::Head => f.write_str("head.json"),
            Object::NumberedHead(number) => write!(f, "head/{number:020}.json"),
            Object::Probe => f.write_str("probe"),
            Object::Manifest { hash, .. } => write!(f, "manifest-{hash}.json"),
            Object::Delta { base, target, hash, .. } => {
                write!(f, "deltas/{base:020}-{target:020}-{hash}.wdelta")
            }
            Object::Part { start, part, hash, .. } => write!(f, "anchors/{start:020}/{part:06}-{hash}"),
            Object::Sums { start, hash, .. } => write!(f, "anchors/{start:020}/sums-{hash}"),
            Object::Anchor { start, hash, .. } => write!(f, "anchors/{start:020}/anchor-{hash}.json"),
            Object::Version { version, .. } => write!(f, "versions/{version:020}.json"),
        }
    }
}
