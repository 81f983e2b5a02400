//! How a failure becomes an exception.
//!
//! The classes stand in `windlass.errors`, where people read them; the table that pairs them with kinds is
//! [`Kind::row`], and a test compares the two.

use pyo3::prelude::*;
use windlass::service::engines::EngineError;
use windlass::service::supervise::SuperviseError;
use windlass::{Error, chain};
use windlass_core::address::AddressError;
use windlass_core::choose::ChooseError;
use windlass_core::chunk::ChunkError;
use windlass_core::dtype::DtypeError;
use windlass_core::error::Kind;
use windlass_core::identity::IdentityError;
use windlass_core::request::RequestError;
use windlass_core::sync_info::SyncInfoError;
use windlass_data::cuda::CudaError;
use windlass_data::history::TrailError;
use windlass_data::image::ImageError;
use windlass_data::load::LoadError;
use windlass_data::publish::PublishError;
use windlass_data::receiver::ReceiverError;
use windlass_data::region::RegionError;
use windlass_data::roles::RoleError;

/// A failure on its way to Python.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
    advice: String,
    /// The stable name of the failure where it has one, the same in every language.
    name: &'static str,
}

impl Failure {
    /// With the advice of its kind, if that has any.
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), advice: kind.advice().into(), name: "" }
    }

    /// A mistake of the caller.
    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(Kind::Invalid, message)
    }

    /// An error with its causes.
    pub(crate) fn of(kind: Kind, error: &dyn std::error::Error) -> Failure {
        Failure::new(kind, chain(error))
    }

    /// The same with a name.
    fn named(self, name: &'static str) -> Failure {
        Failure { name, ..self }
    }
}

/// One `From` for each error that has a kind.
macro_rules! failures {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Failure {
            fn from(e: $error) -> Failure {
                Failure::of(e.kind(), &e)
            }
        }
    )*};
}

failures!(RoleError, ImageError, ReceiverError, LoadError, TrailError);
failures!(ChooseError, ChunkError, CudaError, DtypeError, IdentityError);

impl From<AddressError> for Failure {
    fn from(e: AddressError) -> Failure {
        Failure::of(e.kind(), &e).named(e.name())
    }
}

impl From<RequestError> for Failure {
    fn from(e: RequestError) -> Failure {
        Failure::of(e.kind(), &e).named(e.name())
    }
}

impl From<SyncInfoError> for Failure {
    fn from(e: SyncInfoError) -> Failure {
        Failure::of(e.kind(), &e).named(e.name())
    }
}
failures!(windlass_core::manifest::ManifestError, SuperviseError);
failures!(windlass_data::receiver::HandedError);

impl From<PublishError> for Failure {
    fn from(e: PublishError) -> Failure {
        match e {
            PublishError::Region(e) => e.into(),
            other => Failure::of(other.kind(), &other),
        }
    }
}

impl From<RegionError> for Failure {
    fn from(e: RegionError) -> Failure {
        Failure::from(Error::from(e))
    }
}

impl From<EngineError> for Failure {
    fn from(e: EngineError) -> Failure {
        Failure::from(Error::from(e))
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure { kind: e.kind(), message: e.chain(), advice: e.advice(), name: "" }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        Python::attach(|py| {
            let row = failure.kind.row();
            let made = py
                .import("windlass.errors")
                .and_then(|errors| errors.getattr(row.python))
                .and_then(|class| class.call1((failure.message, failure.advice, failure.name)));
            match made {
                Ok(exception) => PyErr::from_value(exception),
                Err(e) => e,
            }
        })
    }
}

/// The table of kinds: (kind, name of the exception, name of the builtin it derives from, meaning).
#[pyfunction]
pub(crate) fn kinds() -> Vec<(String, &'static str, &'static str, &'static str)> {
    let row = |kind: Kind| (kind.to_string(), kind.row().python, kind.row().builtin, kind.row().meaning);
    Kind::ALL.into_iter().map(row).collect()
}
