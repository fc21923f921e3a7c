//! The 75 tasks of the hotel, each with the milliseconds that it takes in the story.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tierline::{Context, Registry, Task};

use crate::handlers::{options, work};
use crate::load::Job;
use crate::pace::Pace;

macro_rules! tasks {
    ($($payload:ident $name:literal $milliseconds:literal;)*) => {
        $(
            #[derive(Serialize, Deserialize)]
            #[serde(transparent)]
            pub(crate) struct $payload(pub(crate) Job);

            impl Task for $payload {
                const NAME: &'static str = $name;
            }
        )*

        /// Every task, with how long it takes.
        pub(crate) const TASKS: &[(&str, u32)] = &[$(($name, $milliseconds)),*];

        /// A handler for every task.
        pub(crate) fn registry(pace: Pace) -> Result<Registry> {
            let mut registry = Registry::new();
            $(
                registry.register_with::<$payload, _>(
                    |order: $payload, cx: Context| work(order.0, cx),
                    options($name, pace),
                )?;
            )*
            Ok(registry)
        }
    };
}

tasks! {
    SendOtp "email.send_otp" 80;
    SendSms "sms.send" 80;
    DialOutbound "calls.dial_outbound" 120;
    ProcessStripeWebhook "payments.process_stripe_webhook" 120;
    CaptureDeposit "payments.capture_deposit" 150;
    RecordTransaction "wallet.record_transaction" 40;
    IssueDoorCode "access.issue_door_code" 100;

    SendPaymentSuccess "email.send_payment_success" 150;
    SendPaymentFailed "email.send_payment_failed" 150;
    SendBookingConfirmation "email.send_booking_confirmation" 250;
    SendBookingCancelled "email.send_booking_cancelled" 150;
    SendPasswordReset "email.send_password_reset" 150;
    SendTeamInvitation "email.send_team_invitation" 150;
    SendCheckinReminder "sms.send_checkin_reminder" 250;
    NotifyFrontDesk "push.notify_front_desk" 250;
    CreateEvent "calendar.create_event" 200;
    UpdateEvent "calendar.update_event" 200;
    DeleteEvent "calendar.delete_event" 200;
    CreateCustomer "stripe.create_customer" 250;
    CreateSubscription "stripe.create_subscription" 250;
    CancelSubscription "stripe.cancel_subscription" 250;
    RefundPayment "stripe.refund_payment" 250;
    ApproveNumber "phone_numbers.approve" 200;
    ProvisionNumber "phone_numbers.provision" 300;
    HoldRoom "bookings.hold_room" 150;
    ReleaseRoom "bookings.release_room" 150;
    SendLowBalanceAlert "wallet.send_low_balance_alert" 150;

    IndexDocument "documents.index" 350;
    ReindexDocument "documents.reindex" 350;
    ExtractText "documents.extract_text" 350;
    CreateInvoice "invoices.create" 300;
    SendInvoice "invoices.send" 300;
    RetryFailedInvoices "invoices.retry_failed" 300;
    SyncCalendar "calendar.sync" 400;
    RenewChannels "calendar.renew_channels" 300;
    ReconcileCampaigns "campaigns.reconcile" 400;
    ScheduleCalls "campaigns.schedule_calls" 300;
    SyncChannelManager "bookings.sync_channel_manager" 400;
    UpdateAvailability "rooms.update_availability" 400;
    UpdatePrices "rates.update_prices" 400;
    SyncContact "crm.sync_contact" 300;
    DeliverWebhook "webhooks.deliver" 250;
    RequestReview "reviews.request" 250;

    SummariseContact "contacts.summarise" 400;
    MergeDuplicates "contacts.merge_duplicates" 300;
    EnrichContact "contacts.enrich" 300;
    RemoveUnpaid "subscriptions.remove_unpaid" 250;
    SendRenewalNotice "subscriptions.send_renewal_notice" 250;
    VerifyLei "organisations.verify_lei" 300;
    RefreshUsage "organisations.refresh_usage" 250;
    SendWeeklyDigest "email.send_weekly_digest" 250;
    RemoveExpiredSessions "sessions.remove_expired" 200;
    CompactAuditLog "audit.compact_log" 400;
    CheckSchedules "health.check_schedules" 100;
    RefreshDashboard "reports.refresh_dashboard" 400;

    ImportContacts "contacts.import" 700;
    ExportContacts "contacts.export" 300;
    SendBulkEmail "email.send_bulk" 700;
    RenderCatalogue "catalogue.render_pdf" 900;
    RemoveOrphans "storage.remove_orphans" 600;
    ArchiveRecordings "storage.archive_recordings" 700;
    ExportYear "reports.export_year" 900;
    RebuildIndex "documents.rebuild_index" 900;
    ImportHistory "bookings.import_history" 700;
    AggregateMonth "analytics.aggregate_month" 800;
    VerifyBackups "backups.verify" 800;

    DownloadRecording "calls.download_recording" 200;
    BillOperator "calls.bill_operator" 100;
    TranscribeCall "calls.transcribe" 250;
    EvaluateCriteria "calls.evaluate_criteria" 150;
    UpdateUsage "calls.update_usage" 50;
    LinkContact "calls.link_contact" 50;
    ScoreQuality "calls.score_quality" 150;
    SummariseCall "calls.summarise" 120;
    TagTopics "calls.tag_topics" 80;
}

/// The milliseconds that a task takes in the story.
pub(crate) fn typical_milliseconds(task: &str) -> u32 {
    let found = TASKS.iter().find(|(name, _)| *name == task);
    found.map_or(100, |(_, milliseconds)| *milliseconds)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::collections::BTreeSet;

    use super::*;
    use crate::hotel;

    #[test]
    fn every_task_of_the_hotel_has_a_handler_and_no_other_has() {
        let topology = hotel().unwrap();
        let mapped: BTreeSet<&str> = topology.tasks().iter().map(|it| it.name.as_str()).collect();
        let registry = registry(Pace::of(60)).unwrap();
        let handled: BTreeSet<&str> = registry.iter().map(|it| it.name()).collect();
        assert_eq!(handled, mapped);
        assert_eq!(handled.len(), 75);
    }
}
