//! The publisher of a model about which no order has come yet.

use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::{
    Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::stop::Stop;

/// Before the first order there is no publisher to speak to.
#[derive(Debug)]
pub(super) struct NoAgent;

impl NoAgent {
    fn lost<T>(what: &'static str) -> Result<T, ControlError> {
        let why = "no order has named an agent yet".into();
        Err(ControlError::Lost { peer: "no agent".into(), what, why, kind: Kind::NotFound })
    }
}

impl Control for NoAgent {
    fn peer(&self) -> String {
        "no agent".into()
    }

    fn version(&self, _: Option<(Incarnation, Version)>, _: &Stop) -> Result<VersionInfo, ControlError> {
        NoAgent::lost("get the version")
    }

    fn manifest(&self, _: &Stop) -> Result<Manifest, ControlError> {
        NoAgent::lost("get the manifest")
    }

    fn sums(&self, _: &Identity, _: &Stop) -> Result<Vec<windlass_core::digest::BlockSum>, ControlError> {
        NoAgent::lost("get the sums")
    }

    fn register(&self, _: &Registration, _: &Stop) -> Result<Registered, ControlError> {
        NoAgent::lost("register")
    }

    fn request(&self, _: &TransferRequest, _: &Stop) -> Result<TransferAnswer, ControlError> {
        NoAgent::lost("request a transfer")
    }

    fn done(&self, _: &TransferDone, _: &Stop) -> Result<(), ControlError> {
        NoAgent::lost("report a transfer")
    }
}
