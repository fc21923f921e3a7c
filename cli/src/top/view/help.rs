//! What keys and columns are.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::widgets::Paragraph;

const HELP: &str = "
  ↑ ↓ or k j   choose a tier          Enter   look into it, and back
  s            sort                   r       ask now
  p            pause or resume it: asks for a reason, Esc changes nothing
  q or Esc     back, quit             Ctrl-C  quit

  WAITING      tasks that are due; ≥: no more are counted
  OLDEST       how long the oldest has waited; ≈: RabbitMQ does not say, so
               this is an estimate. Red: longer than the SLO
  RUN          how many run        CONS     consumers of the queue
  IN/s OUT/s   of the last 5 min   P50 P99  waits of the last 5 min
  SLO          how soon a task should start; P99 is green within it
  BUDGET       what is left of the error budget of the last 24 h
  DEAD +1h     dead letters, and how many came in the last hour
  OUT          attempts that ended, minute by minute, the latest at the right";

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect) {
    frame.render_widget(Paragraph::new(HELP), area);
}
