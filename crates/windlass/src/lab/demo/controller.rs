//! The controller of a demo, and its live page.

use std::path::Path;

use serde_json::json;
use windlass_core::address::Token;

use super::child::Child;
use super::cluster::POLL;
use super::{TIMEOUT, event};
use crate::console::Session;
use crate::error::Error;
use crate::service::controller::client::ControllerClient;
use crate::service::controller::status::Status;
use crate::service::controller::wire::TrainerLeft;

/// The name of the only set.
pub(super) const SET: &str = "policy";

/// A running controller.
pub(super) struct Controller {
    pub(super) process: Child,
    pub(super) client: ControllerClient,
}

impl Controller {
    /// Starts it, and prints the address of its page. `heartbeat` is in seconds.
    pub(super) fn start(
        home: &Path,
        session: &Session,
        (token_file, token): (&Path, &Token),
        models: &[&str],
        heartbeat: f64,
    ) -> Result<Controller, Error> {
        let args = [
            "controller".to_owned(),
            format!("--set={SET}={}", models.join(",")),
            format!("--token-file={}", token_file.display()),
            format!("--heartbeat={heartbeat}"),
            // No receiver existed before this controller.
            "--settle=0.05".to_owned(),
            "--with-parent".to_owned(),
        ];
        let mut process = Child::start("controller", home, args)?;
        let stop = session.cancel().with_timeout(TIMEOUT);
        let endpoint = process.expect("listen", &stop, |line| {
            event(line, "listening").then(|| Some(line.get("endpoint")?.as_str()?.to_owned())).flatten()
        })?;
        // The token is valid for this run only, and the user of this terminal owns the processes.
        session.event(
            &json!({ "event": "listening", "page": format!("{endpoint}/"), "token_file": token_file }),
            || format!("live page: {endpoint}/#token={}\n", token.expose()),
        );
        let client = ControllerClient::new(&endpoint, token.clone())?;
        Ok(Controller { process, client })
    }

    /// Tells the controller that the trainers ended on purpose. Otherwise it would report them as dead.
    pub(super) fn sign_off(&self, status: &Status, session: &Session) -> Result<(), Error> {
        let stop = session.cancel().with_timeout(TIMEOUT);
        for trainer in &status.trainers {
            let (model_id, incarnation) = (trainer.model_id.clone(), trainer.incarnation);
            self.client.trainer_left(&TrainerLeft { model_id, incarnation }, &stop)?;
        }
        Ok(())
    }

    /// Keeps the page up until Ctrl-C.
    pub(super) fn stay(&mut self, session: &Session, note: &str) -> Result<(), Error> {
        session.note(&format!("The live page stays until Ctrl-C.{note}"));
        while !session.cancel().is_set() {
            self.process.check()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}
