//! What running sandboxes are shown of the machine changes: because somebody asks, or because lxcfs comes or goes.

use super::Daemon;
use crate::error::{Error, Result};
use crate::view::give;
use crate::wire::{self, LaunchFailure, ResourceView};
use crate::workers::{Given, Origin, Report, Task, OURSELVES};

impl Daemon<'_> {
    /// A running sandbox has been given other files.
    pub(super) fn given(&mut self, given: Given, origin: Origin) -> Result<()> {
        let Given {
            sandbox,
            view,
            kind,
            server,
        } = given;
        self.setting
            .sandboxes
            .set_view(&sandbox, view, kind, server)?;
        self.succeed(origin, wire::Viewed { view: kind })
    }

    /// It could not be given them. What it is shown stays; if that was our own idea it is not tried again and again.
    pub(super) fn not_given(
        &mut self,
        given: &Given,
        failure: &LaunchFailure,
        origin: Origin,
    ) -> Result<()> {
        if origin == OURSELVES {
            self.setting.sandboxes.set_view(
                &given.sandbox,
                given.view,
                given.kind,
                given.server,
            )?;
        }
        self.fail(origin, failure)
    }

    /// When lxcfs has come or gone, running sandboxes are given what they would be given now, one after the other.
    pub(super) fn give_views(&mut self) -> Result<()> {
        let live = self.setting.views.lxcfs();
        let server = live.server();
        if live.is_starting() || self.viewed == Some(server) || self.workers.have_views() {
            return Ok(());
        }
        let views = &self.setting.views;
        let stale = |view: Option<&ResourceView>, server| views.is_stale(view, server);
        match self.setting.sandboxes.find_by_view(stale) {
            Some((sandbox, view)) => {
                self.enqueue(Task::View(Given::wanted(sandbox, view)), OURSELVES)
            }
            None => {
                self.viewed = Some(server);
                Ok(())
            }
        }
    }

    pub(super) fn view(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::ViewArgs { sandbox, view } = wire::decode_args(message)?;
        self.enqueue(Task::View(Given::wanted(sandbox, view)), origin)
    }

    pub(super) fn start_view(&mut self, mut given: Given, origin: Origin) -> Result<()> {
        let Some(process) = self.setting.sandboxes.process_of(&given.sandbox) else {
            return Err(Error::Refused {
                why: format!("{} does not run", given.sandbox),
                errno: libc::ESRCH,
            });
        };
        let shown = self.setting.views.show(Some(&given.view))?;
        (given.kind, given.server) = (shown.kind, shown.server);
        let (system, lock) = (self.setting.system, &self.setting.lock);
        self.workers
            .start(Task::View(given), origin, lock, &[], |_| Report {
                failure: give(system, process, &shown.sources)
                    .err()
                    .map(|error| error.into_failure("view")),
                ..Report::default()
            })
    }
}
