// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {AgentRole} from "./AgentRole.sol";
import {CfaToken} from "./CfaToken.sol";

/// Delivery against payment, many trades in one transaction.
///
/// A trade moves units from the seller to the buyer, CFA-RUB from the buyer to the seller, and the
/// fee from the buyer to the fee account. It is atomic: each trade runs in its own call, and a
/// failed call removes only its trade from the batch (`TradeFailed`).
///
/// A batch is accepted once by its id, a trade once by its number. Trades have dense numbers per
/// token from 1, so "seen" is one bit, 256 per storage slot. The revert of a failed trade also
/// clears its bit: a later batch can contain the trade again.
contract Settlement is AgentRole {
    /// Enough for the costliest trade (every slot cold and new). So a gas limit that is too low
    /// fails the whole batch and never a single trade.
    uint256 public constant GAS_RESERVE_PER_TRADE = 300_000;

    CfaToken public immutable money;
    address public immutable feeAccount;

    mapping(bytes32 batchId => bool) public batchAccepted;
    mapping(address token => mapping(uint256 slot => uint256 bits)) private tradesSeen;

    event BatchSettled(bytes32 indexed batchId, uint256 settled, uint256 failed);
    event TradeSettled(bytes32 indexed batchId, address indexed token, uint256 indexed tradeNumber);
    event TradeFailed(bytes32 indexed batchId, address indexed token, uint256 indexed tradeNumber, bytes reason);
    event IssueSettled(
        bytes32 indexed issueId, address indexed token, address indexed investor, uint256 units, uint256 payment
    );

    error BatchAlreadyAccepted(bytes32 batchId);
    error TradeAlreadyAccepted(address token, uint256 tradeNumber);
    error OnlySelf();
    error MalformedBatch();
    error GasTooLow();

    constructor(CfaToken money_, address feeAccount_) {
        money = money_;
        feeAccount = feeAccount_;
    }

    function tradeAccepted(address token, uint256 tradeNumber) external view returns (bool) {
        return tradesSeen[token][tradeNumber >> 8] & (1 << (tradeNumber & 0xff)) != 0;
    }

    /// `trades` holds two words per trade, most significant bits first:
    ///   word 0: trade number (64 bits) | index into tokens (16) | buyer's index in members (24)
    ///           | seller's index in members (24) | quantity (128)
    ///   word 1: payment to the seller (128) | fee (128)
    /// Trade number 0 is a paid transfer without a trade: only its batch id protects it from a
    /// repeat.
    function settleTrades(
        bytes32 batchId,
        address[] calldata tokens,
        address[] calldata members,
        uint256[] calldata trades
    ) external onlyAgent {
        if (batchAccepted[batchId]) revert BatchAlreadyAccepted(batchId);
        if (trades.length & 1 != 0) revert MalformedBatch();
        batchAccepted[batchId] = true;
        uint256 failed = 0;
        for (uint256 i = 0; i < trades.length; i += 2) {
            uint256 head = trades[i];
            uint256 tail = trades[i + 1];
            address token = tokens[(head >> 176) & 0xffff];
            if (gasleft() < GAS_RESERVE_PER_TRADE) revert GasTooLow();
            try
                this.exchange(
                    token,
                    head >> 192,
                    members[(head >> 152) & 0xffffff],
                    members[(head >> 128) & 0xffffff],
                    head & type(uint128).max,
                    tail >> 128,
                    tail & type(uint128).max
                )
            {
                emit TradeSettled(batchId, token, head >> 192);
            } catch (bytes memory reason) {
                ++failed;
                emit TradeFailed(batchId, token, head >> 192, reason);
            }
        }
        emit BatchSettled(batchId, trades.length / 2 - failed, failed);
    }

    /// One trade. External only so that its failure reverts it alone.
    function exchange(
        address token,
        uint256 tradeNumber,
        address buyer,
        address seller,
        uint256 quantity,
        uint256 payment,
        uint256 fee
    ) external {
        if (msg.sender != address(this)) revert OnlySelf();
        if (tradeNumber != 0) {
            uint256 bit = 1 << (tradeNumber & 0xff);
            uint256 seen = tradesSeen[token][tradeNumber >> 8];
            if (seen & bit != 0) revert TradeAlreadyAccepted(token, tradeNumber);
            tradesSeen[token][tradeNumber >> 8] = seen | bit;
        }
        CfaToken(token).operatorTransfer(seller, buyer, quantity);
        money.operatorPay(buyer, seller, payment, feeAccount, fee);
    }

    /// Primary placement: new units to the investor against CFA-RUB to the issuer. `issueId` is
    /// accepted once.
    function issueAgainstPayment(
        bytes32 issueId,
        CfaToken token,
        address investor,
        uint256 units,
        address issuer,
        uint256 payment
    ) external onlyAgent {
        if (batchAccepted[issueId]) revert BatchAlreadyAccepted(issueId);
        batchAccepted[issueId] = true;
        if (payment != 0) money.operatorTransfer(investor, issuer, payment);
        token.mint(investor, units);
        emit IssueSettled(issueId, address(token), investor, units, payment);
    }
}
